// A C++20 program with nothing but the installed library: a refused call says why.
#include <offload_simple.h>

#include <cstdio>
#include <string_view>

int main() {
  const auto options = offload_init<offload_context_options_t>();
  offload_context_t context = nullptr;
  if (offload_context_create(&options, &context) != OFFLOAD_OK) {
    std::puts(offload_last_error());
    return 1;
  }
  const int32_t status = offload_optimizer_create(context, nullptr, nullptr);
  const std::string_view name = offload_status_name(status);
  const std::string_view text = offload_last_error();
  std::printf("%s\n%s\n", offload_build_info(), text.data());
  const bool destroyed = offload_destroy_all(context, nullptr) == OFFLOAD_OK;
  return name == "INVALID_ARGUMENT" && !text.empty() && destroyed ? 0 : 1;
}
