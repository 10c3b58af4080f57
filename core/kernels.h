// L1: arithmetic and copies on plain memory, one table per instruction set, all equal bit for bit.
// Must not know ranks, schedules or threads.
//
// Laws: the terms of a fold are combined from left to right, so the caller's order of terms (rank
// order) is the association. 16-bit floats are widened to fp32 once, combined in fp32 and rounded
// once at the end (round to nearest even). Integers wrap. A factor of 1 costs nothing and changes
// nothing. Min and Max are those of IEEE 754-2019: NaN is handed on and -0 is below +0. Which NaN
// (its sign and payload) comes of several, or of none, is not promised. The processor rounds to
// nearest and keeps subnormals: the caller sees to that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "types.h"

namespace horovod {

// What a fold does to each element:
//   result = round(post(divide(term[0]' op term[1]' op ...)))   with   term' = pre(term)
// - Floats: pre multiplies by `prescale`; `postscale / divisor` is one factor (float32 and 16-bit
//   data: computed in double, rounded to float once; float64 and complex128: double), applied after
//   the fold and before the one rounding.
// - Integers: pre is trunc(prescale * x) in double, the sum wraps, division by `divisor` is exact
//   and truncates toward zero, post is trunc(postscale * x) in double; out-of-range doubles
//   saturate.
// - Complex: as the float of its parts. Bool: factors are ignored (refused above).
struct FoldSpec {
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;  // Average is Sum with a divisor
  double prescale = 1.0;
  double postscale = 1.0;
  uint32_t divisor = 1;
};

// How a transport slot is written: through the caches, or past them straight to memory. The bits
// are the same. Streaming, from some 2 KiB on, is what to do where another core's cache holds the
// slot's lines, as each would have to be fetched from there first. Ordinary is what to do where the
// cores share a cache, or the reader would have to fetch from memory what could lie in it.
enum class Stores : uint8_t { Ordinary, Streaming };
#if defined(__x86_64__)
inline constexpr bool kHasStreamingStores = true;
#else
inline constexpr bool kHasStreamingStores = false;  // both kinds are ordinary
#endif

// Folds `terms[0..n_terms)`, at least one, of `count` elements each into `out`. `out` may be one of
// the terms, else overlaps none. If `slot` is not null the result is also written there, as
// copy_to_slot would: it is aligned to kAlignment and padded to it (the padding's content is
// unspecified). `out` and any term may be misaligned.
using FoldFn = void (*)(const FoldSpec& spec, std::byte* out, std::byte* slot, Stores stores,
                        const std::byte* const* terms, size_t n_terms, size_t count);

// Copies into a transport slot, aligned and padded to kAlignment. After either the caller issues
// store_fence(), if the stores were streaming, before it publishes the slot.
using CopyFn = void (*)(std::byte* slot, Stores stores, const std::byte* from, size_t bytes);

// factors[0] * terms[0] + factors[1] * terms[1] + ..., at least one term: element by element, in
// double, from left to right.
struct Combination {
  const std::byte* const* terms = nullptr;
  const double* factors = nullptr;
  size_t n = 0;
};

struct Products {
  double xy = 0, xx = 0, yy = 0;
};

// The scalar products of `x` and `y` over `count` elements, in double. The association depends on
// `count` alone, so equal vectors have equal products. For floats that aren't complex.
using ProductsFn = Products (*)(DType dtype, const Combination& x, const Combination& y,
                                size_t count);

// Writes `count` elements of `x`, rounded once, to `out`, which may be one of the terms and else
// overlaps none. For floats that aren't complex.
using CombineFn = void (*)(DType dtype, std::byte* out, const Combination& x, size_t count);

struct Kernels {
  std::string_view name;  // "baseline", "avx2", "avx512"
  FoldFn fold;
  CopyFn copy_to_slot;
  ProductsFn products;
  CombineFn combine;
};

// The table for `name` ("auto" = the best this processor has). Throws Error(InvalidArgument) for an
// unknown name and Error(Unavailable) for one that this processor or build lacks.
const Kernels& kernels(std::string_view name);

// Makes streaming stores visible before anything stored afterwards.
void store_fence();

}  // namespace horovod
