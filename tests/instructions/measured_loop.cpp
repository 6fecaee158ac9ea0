// The program whose instructions instructions_test.sh counts: one kernel over one array. Its
// argument names the kernel.
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/stochastic_rounding.h"

namespace hybridopt {
namespace {

constexpr uint64_t kElements = 1 << 16;

// Valgrind knows no AVX-512, and counts must not depend on the CPU.
const KernelTable* FindAvx2() {
  for (const KernelTable* table : SimdKernels())
    if (std::strcmp(table->isa, "avx2") == 0) return table;
  return nullptr;
}

struct Named {
  const char* name;
  StateFormats formats;
};
constexpr Named kFormatsNamed[] = {
    {"fp32", {}},
    {"split", {.master = Format::kSplit}},
    {"bf16_moments", {Format::kFp32, Format::kBf16, Format::kBf16}},
    {"split_bf16_moments", {Format::kSplit, Format::kBf16, Format::kBf16}},
    {"split24", {.master = Format::kSplit24}},
    {"split24_bf16_moments", {Format::kSplit24, Format::kBf16, Format::kBf16}}};

}  // namespace
}  // namespace hybridopt

// Only instructions inside these two functions are counted.
extern "C" __attribute__((noinline)) void MeasuredUpdate(hybridopt::UpdateFunction update,
                                                         const hybridopt::Coefficients& c,
                                                         const hybridopt::UpdateSpan& span) {
  update(c, span);
}
extern "C" __attribute__((noinline)) void MeasuredNorm(hybridopt::SumSquaresFunction sum,
                                                       const void* grad, double* sums) {
  sum(grad, hybridopt::kElements, sums);
}

int main(int count, char** arguments) {
  using namespace hybridopt;
  const char* name = count == 2 ? arguments[1] : "";
  const KernelTable* table = FindAvx2();
  if (table == nullptr) {
    std::puts("no AVX2 here");
    return 77;
  }
  // bf16 gradients and params of 1; fp32 arrays are as good as twice as many bf16 ones.
  std::vector<uint16_t> grad(kElements, 0x3F80), param(kElements, 0x3F80);
  std::vector<float> master(kElements, 1.0f), moment0(kElements, 1.0f), moment1(kElements, 1.0f);
  if (std::strcmp(name, "norm") == 0) {
    std::vector<double> sums(kElements / kNormBlockElements);
    MeasuredNorm(table->SumSquares(OFFLOAD_BF16), grad.data(), sums.data());
  }
  for (const Named& one : kFormatsNamed) {
    if (std::strcmp(name, one.name) != 0) continue;
    Coefficients c = {};
    c.grad_factor = c.step_size = c.keep0 = c.keep1 = c.eps = 0.5f;
    c.weight0 = c.weight1 = 0.1f;
    const UpdateSpan span = {grad.data(),
                             param.data(),
                             master.data(),
                             moment0.data(),
                             moment1.data(),
                             kElements,
                             StochasticRounding(1, 2, 3)};
    MeasuredUpdate(table->Update(Rule::kAdam, {OFFLOAD_BF16, OFFLOAD_BF16, one.formats}), c, span);
  }
  std::printf("compiler %s\nelements %llu\n", __VERSION__,
              static_cast<unsigned long long>(kElements));
  return 0;
}
