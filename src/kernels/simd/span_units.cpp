#include "kernels/simd/span_units.h"

#include <cstddef>
#include <cstring>

#include "kernels/stochastic_rounding.h"

namespace hybridopt {
namespace {

constexpr uint64_t kElementBytesMost = sizeof(float);

// A copy of the last elements of an array, fewer than a unit, padded to a unit. The padding is
// zero, which every rule maps to finite numbers. The address is not a multiple of a vector's size:
// params at such an address would be stored past the caches, and this copy is read next.
class PaddedCopy {
 public:
  PaddedCopy(uint64_t unit, uint64_t bytes) : bytes_(bytes) {
    std::memset(data(), 0, unit * kElementBytesMost);
  }
  // NULL: there is no such array.
  void CopyIn(const void* elements) {
    if (elements != nullptr) std::memcpy(data(), elements, bytes_);
  }
  void CopyOut(void* elements) const {
    if (elements != nullptr) std::memcpy(elements, memory_ + kElementBytesMost, bytes_);
  }
  std::byte* data() { return memory_ + kElementBytesMost; }

 private:
  alignas(64) std::byte memory_[(kUnitMost + 1) * kElementBytesMost];
  const uint64_t bytes_;
};

// Puts count bits behind the first `begin` bits of `to`. It writes the whole byte of the last bit.
void PutBits(const uint8_t* bits, uint64_t count, uint8_t* to, uint64_t begin) {
  to += begin / 8;
  const uint64_t shift = begin % 8;
  for (uint64_t done = 0; done < count; done += 8, ++bits, ++to) {
    const uint64_t left = count - done;
    const uint32_t mask = left < 8 ? (1u << left) - 1 : 0xFF;
    const uint32_t put = (*bits & mask) << shift;
    to[0] = static_cast<uint8_t>(shift == 0 ? put : to[0] | put);
    if (shift + left > 8 && shift > 0) to[1] = static_cast<uint8_t>(put >> 8);
  }
}

// Updates the last elements, fewer than a unit, with the code of all others, on padded copies.
void UpdateRest(const UnitKernels& kernels, UpdateUnitsFunction update, const Coefficients& c,
                const UpdateSpan& rest, const RangeRounding& range) {
  const SpanTypes& types = kernels.types;
  const auto bytes = [&](Format format) { return RowOf(format).Bytes(rest.count); };
  PaddedCopy grad(kernels.unit, rest.count * DtypeBytes(types.grad_dtype));
  PaddedCopy param(kernels.unit, rest.count * DtypeBytes(types.param_dtype));
  PaddedCopy master(kernels.unit, bytes(types.formats.master));
  PaddedCopy moment0(kernels.unit, bytes(types.formats.moment0));
  PaddedCopy moment1(kernels.unit, bytes(types.formats.moment1));
  grad.CopyIn(rest.grad);
  if (RowOf(types.formats.master).beside_param) param.CopyIn(rest.param);
  master.CopyIn(rest.master);
  moment0.CopyIn(rest.moment0);
  moment1.CopyIn(rest.moment1);
  uint8_t changed[kUnitMost / 8];
  UpdateSpan whole = {grad.data(),    param.data(),   master.data(),
                      moment0.data(), moment1.data(), kernels.unit};
  whole.changed = rest.changed == nullptr ? nullptr : changed;
  update(c, whole, range);
  if (rest.changed != nullptr) PutBits(changed, rest.count, rest.changed, 0);
  moment0.CopyOut(rest.moment0);
  moment1.CopyOut(rest.moment1);
  master.CopyOut(rest.master);
  param.CopyOut(rest.param);
}

// Updates elements whose indices are consecutive.
void UpdateRange(const UnitKernels& kernels, UpdateUnitsFunction update, const Coefficients& c,
                 const UpdateSpan& span, const RangeRounding& range) {
  UpdateSpan units = span,
             rest = Advanced(span, kernels.types, span.count - span.count % kernels.unit);
  rest.count = span.count % kernels.unit;
  units.count = span.count - rest.count;
  update(c, units, range);
  if (rest.count == 0) return;
  RangeRounding behind = range;
  behind.counter += static_cast<uint32_t>(units.count);
  UpdateRest(kernels, update, c, rest, behind);
}

}  // namespace

void UpdateInUnits(const UnitKernels& kernels, const Coefficients& c, const UpdateSpan& span) {
  const UpdateUnitsFunction at_random = kernels.at_random.Of(span);
  if (at_random == nullptr || !span.rounding.stochastic)
    return UpdateRange(kernels, kernels.to_nearest.Of(span), c, span, {span.rounding, 0, 0});
  ForEachIndexRange(span.order, span.count, [&](uint64_t begin, uint64_t count, uint64_t index) {
    UpdateSpan range = Advanced(span, kernels.types, begin);
    range.count = count;
    uint8_t changed[kNotedMost / 8];  // a range may begin within a byte
    if (span.changed != nullptr) range.changed = changed;
    UpdateRange(kernels, at_random, c, range,
                {span.rounding, CounterOf(span.rounding, index), TweakOf(span.rounding, index)});
    if (span.changed != nullptr) PutBits(changed, count, span.changed, begin);
  });
}

}  // namespace hybridopt
