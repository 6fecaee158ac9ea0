#include "handles.h"

#include <string>
#include <string_view>

namespace tool {
namespace {

// A text of the library, which names a field of the ABI, and the text that this tool shows instead.
struct Words {
  std::string_view abi, person;
};
constexpr Words kWords[] = {
    {"options.device_kind is OFFLOAD_DEVICE_CUDA, but ", ""},
    {", or use OFFLOAD_DEVICE_HOST or OFFLOAD_DEVICE_SIM", ""},
    {"; the trace is kept, call offload_optimizer_trace_stop again with another path "
     "(NULL gives the trace up)",
     ""},
};

}  // namespace

hybridopt::Status StatusOf(int32_t status) {
  if (status == OFFLOAD_OK) return {};
  std::string text = offload_last_error();
  for (const Words& words : kWords)
    if (const size_t at = text.find(words.abi); at != std::string::npos)
      text.replace(at, words.abi.size(), words.person);
  return hybridopt::Status::Error(status, "%s", text.c_str());
}

}  // namespace tool
