// L1: the one text of the kernels, compiled once per instruction set by kernels_<name>.cc with that
// set's flags. Must not emit anything that another file's code could be linked to.
//
// The linker keeps one copy of each inline function, whichever file it came from; were it one
// compiled here for AVX-512, a processor without it would run it. So everything is in an unnamed
// namespace, and of the headers below only types, enumerators and constant expressions are used.
//
// A fold walks its terms in steps of a few vectors that stay in registers: each term is read once,
// the result is written once. The width of a vector is what differs between the instruction sets;
// lanes never mix, so the bits don't.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace horovod {
namespace {

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

template <class T, size_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T>
using Vector = typename VectorOf<T, kVectorBytes>::type;

template <class V>
V load_vector(const std::byte* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
void store_vector(std::byte* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

// A streaming store where there is one. `to` is aligned to kVectorBytes.
template <class V>
void stream_vector(std::byte* to, V v) {
  static_assert(sizeof v == kVectorBytes);
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)v);
#elif defined(__x86_64__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)v);
#else
  store_vector(to, v);
#endif
}

// -------------------------------------------------------------------------------------------------
// Formats: how the elements in kVectorBytes of memory become kParts vectors of Value, and back.

template <class T, size_t kParts>
struct Values {
  Vector<T> part[kParts];
};

template <class T>
struct Plain {
  using Value = T;
  static constexpr size_t kParts = 1;
  static Values<T, 1> load(const std::byte* from) { return {{load_vector<Vector<T>>(from)}}; }
  static Vector<T> pack(Values<T, 1> v) { return v.part[0]; }
};

// Any byte but 0 is true; 1 is what we write.
struct Bool {
  using Value = uint8_t;
  static constexpr size_t kParts = 1;
  static Values<uint8_t, 1> load(const std::byte* from) {
    return {{(Vector<uint8_t>)(load_vector<Vector<uint8_t>>(from) != 0) & 1}};
  }
  static Vector<uint8_t> pack(Values<uint8_t, 1> v) { return v.part[0]; }
};

// Two 16-bit floats lie in each 32 bits. The even ones make one vector, the odd ones another: no
// lane has to move.
using Float = Vector<float>;
using Bits = Vector<uint32_t>;

struct BFloat16 {
  using Value = float;
  static constexpr size_t kParts = 2;
  static Values<float, 2> load(const std::byte* from) {
    const Bits both = load_vector<Bits>(from);
    return {{(Float)(both << 16), (Float)(both & 0xffff0000)}};
  }
  static Bits pack(Values<float, 2> v) {
    return round(v.part[0]) >> 16 | (round(v.part[1]) & 0xffff0000);
  }

 private:
  static Bits round(Float v) {  // to the upper 16 bits; what is below is left over
    const Bits bits = (Bits)v;
    return v == v ? bits + 0x7fff + ((bits >> 16) & 1) : bits | 0x400000;
  }
};

struct Float16 {
  using Value = float;
  static constexpr size_t kParts = 2;

#if defined(__F16C__)
  static constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#endif
#if defined(__AVX512F__)
  // Masked with all lanes on: g++ 12 warns of uninitialized memory inside its own unmasked ones.
  static Values<float, 2> load(const std::byte* from) {
    return {{_mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(from)),
             _mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(from + 32))}};
  }
  static __m512i pack(Values<float, 2> v) {
    const __m256i low = _mm512_maskz_cvtps_ph(0xffff, v.part[0], kNearest);
    const __m256i high = _mm512_maskz_cvtps_ph(0xffff, v.part[1], kNearest);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  }
#elif defined(__F16C__)
  static Values<float, 2> load(const std::byte* from) {
    return {{_mm256_cvtph_ps(load_vector<__m128i>(from)),
             _mm256_cvtph_ps(load_vector<__m128i>(from + 16))}};
  }
  static __m256i pack(Values<float, 2> v) {
    return _mm256_set_m128i(_mm256_cvtps_ph(v.part[1], kNearest),
                            _mm256_cvtps_ph(v.part[0], kNearest));
  }
#else
  // The same bits as those instructions give, NaNs included. Exponents are re-biased by 127 - 15 =
  // 112. The spacing of subnormal halves, 2^-24, is that of the floats from 0.5 to 1: adding 0.5
  // makes the processor shift and round. Widening puts their fraction under the exponent of 2^-14,
  // the least normal half, and takes 2^-14 off again.
  static Values<float, 2> load(const std::byte* from) {
    const Ints both = load_vector<Ints>(from);
    return {{widen(both & 0xffff), widen((both >> 16) & 0xffff)}};
  }
  static Bits pack(Values<float, 2> v) { return narrow(v.part[0]) | narrow(v.part[1]) << 16; }

 private:
  using Ints = Vector<int32_t>;  // baseline x86 has no unsigned comparisons

  static Float widen(Ints half) {
    const Ints magnitude = (half & 0x7fff) << 13;
    const Ints normal = magnitude + (112 << 23);
    const Ints subnormal = (Ints)((Float)(magnitude + (113 << 23)) - 0x1p-14f);
    const Ints finite = magnitude < (1 << 23) ? subnormal : normal;
    const Ints infinite = magnitude + (224 << 23);
    const Ints special = magnitude == (31 << 23) ? infinite : infinite | 0x400000;  // a quiet NaN
    return (Float)((Bits)(magnitude < (31 << 23) ? finite : special) | (Bits)(half & 0x8000) << 16);
  }
  static Bits narrow(Float v) {
    const Bits sign = (Bits)v >> 16 & 0x8000;
    const Ints magnitude = (Ints)v & 0x7fffffff;
    const Ints rounded = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const Ints normal = rounded < 0x7c00 ? rounded : Ints{} + 0x7c00;  // or infinite
    const Ints subnormal = (Ints)((Float)magnitude + 0.5f) - 0x3f000000;
    const Ints number = magnitude < (113 << 23) ? subnormal : normal;
    const Ints quiet = (magnitude >> 13 & 0x3ff) | 0x7e00;
    return (Bits)(magnitude > 0x7f800000 ? quiet : number) | sign;
  }
#endif
};

// -------------------------------------------------------------------------------------------------
// Operations on vectors of T.

template <class T, bool kFloat = std::is_floating_point_v<T>>
struct Wrapping {  // signed overflow is undefined, unsigned wraps
  using type = std::make_unsigned_t<T>;
};
template <class T>
struct Wrapping<T, true> {
  using type = T;
};

template <class T>
struct Sum {
  using W = Vector<typename Wrapping<T>::type>;
  static Vector<T> apply(Vector<T> a, Vector<T> b) { return (Vector<T>)((W)a + (W)b); }
};

template <class T>
struct Product {
  using W = Vector<typename Wrapping<T>::type>;
  static Vector<T> apply(Vector<T> a, Vector<T> b) { return (Vector<T>)((W)a * (W)b); }
};

// As minimum and maximum of IEEE 754-2019: the first NaN wins, and -0 is below +0, so the order of
// terms doesn't matter.
template <class T, bool kMin>
struct Extreme {
  static Vector<T> apply(Vector<T> a, Vector<T> b) {
    const Vector<T> extreme = (kMin ? a < b : a > b) ? a : b;
    if constexpr (std::is_integral_v<T>) {
      return extreme;
    } else {
      using B = Vector<std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
      // If equal, they differ at most in the sign of zero.
      const Vector<T> equal = (Vector<T>)(kMin ? (B)a | (B)b : (B)a & (B)b);
      return a == a ? (a == b ? equal : extreme) : a;
    }
  }
};

template <class T>
using Min = Extreme<T, true>;
template <class T>
using Max = Extreme<T, false>;

struct Or {
  static Vector<uint8_t> apply(Vector<uint8_t> a, Vector<uint8_t> b) { return a | b; }
};

struct And {
  static Vector<uint8_t> apply(Vector<uint8_t> a, Vector<uint8_t> b) { return a & b; }
};

// Real and imaginary parts alternate. Written with a sum only: of a loop that adds and subtracts by
// turns g++ 12 makes fused multiply-adds in spite of -ffp-contract=off.
template <class T>
struct ComplexProduct {
  static Vector<T> apply(Vector<T> a, Vector<T> b) {
    return apply(a, b, std::make_index_sequence<kVectorBytes / sizeof(T)>());
  }

 private:
  template <size_t... kLanes>
  static Vector<T> apply(Vector<T> a, Vector<T> b, std::index_sequence<kLanes...>) {
    const Vector<T> real = __builtin_shufflevector(a, a, (kLanes & ~size_t{1})...);
    const Vector<T> imaginary = __builtin_shufflevector(a, a, (kLanes | 1)...);
    const Vector<T> crossed = __builtin_shufflevector(b, b, (kLanes ^ 1)...);
    const Vector<T> signs = {(kLanes % 2 == 0 ? T{-1} : T{1})...};
    return real * b + signs * imaginary * crossed;
  }
};

// -------------------------------------------------------------------------------------------------
// Factors.

template <class T>
struct Unscaled {
  explicit Unscaled(const FoldSpec&) {}
  Vector<T> pre(Vector<T> v) const { return v; }
  Vector<T> post(Vector<T> v) const { return v; }
};

template <class T, bool kFloat = std::is_floating_point_v<T>>
struct Scaled;

template <class T>
struct Scaled<T, true> {
  explicit Scaled(const FoldSpec& spec)
      : pre_(static_cast<T>(spec.prescale)), post_(static_cast<T>(spec.postscale / spec.divisor)) {}
  Vector<T> pre(Vector<T> v) const { return v * pre_; }
  Vector<T> post(Vector<T> v) const { return v * post_; }

 private:
  T pre_, post_;
};

template <class T>
struct Scaled<T, false> {
  explicit Scaled(const FoldSpec& spec)
      : pre_(spec.prescale), post_(spec.postscale), divisor_(spec.divisor) {}
  Vector<T> pre(Vector<T> v) const { return pre_ == 1.0 ? v : scaled(v, pre_); }
  Vector<T> post(Vector<T> v) const {
    if (divisor_ != 1) v = divided(v, divisor_);
    return post_ == 1.0 ? v : scaled(v, post_);
  }

 private:
  // Not inlined: two dozen copies of loops that conversions make slow anyway are of no use.
  __attribute__((noinline)) static Vector<T> divided(Vector<T> v, uint32_t divisor) {
    // Doubles divide faster, and exactly: a quotient that isn't whole is 1/divisor or more away
    // from a whole number, 2^-32 of itself, and rounding moves it by 2^-53 of itself.
    using Wide = std::conditional_t<kNarrow, double, int64_t>;
    const Wide by = divisor;
    return each(
        v, [by](T x) { return static_cast<T>(static_cast<Signed>(static_cast<Wide>(x) / by)); });
  }

  // Without branches, for the compiler to make vectors of it.
  __attribute__((noinline)) static Vector<T> scaled(Vector<T> v, double factor) {
    constexpr T kMin = std::numeric_limits<T>::min();
    constexpr T kMax = std::numeric_limits<T>::max();
    constexpr double kLeast = static_cast<double>(kMin);
    constexpr T kExact = kNarrow ? kMax : kMax - 1023;  // the greatest that a double holds
    constexpr double kGreatest = static_cast<double>(kExact);
    return each(v, [factor](T element) {
      double x = factor * static_cast<double>(element);
      x = x == x ? x : 0;  // infinity times zero
      x = x < kLeast ? kLeast : x;
      const T inside = static_cast<T>(static_cast<Signed>(x < kGreatest ? x : kGreatest));
      return x > kGreatest ? kMax : inside;
    });
  }

  static constexpr bool kNarrow = sizeof(T) <= 4;
  // What processors convert doubles to.
  using Signed = std::conditional_t<kNarrow, int32_t, int64_t>;

  template <class F>
  static Vector<T> each(Vector<T> v, F f) {
    T lanes[kVectorBytes / sizeof(T)];
    __builtin_memcpy(lanes, &v, sizeof v);
    for (T& lane : lanes) lane = f(lane);
    __builtin_memcpy(&v, lanes, sizeof v);
    return v;
  }

  double pre_, post_;
  uint32_t divisor_;
};

// -------------------------------------------------------------------------------------------------
// Copying into a slot.

// Below, waiting for memory costs more than the ownership of the lines. Handed over to another core
// and answered, ordinary -> streaming: 256 B 0.54 -> 0.65 us, 2 KiB 1.10 -> 1.03 us, 4 KiB 1.54 ->
// 1.27 us (the fastest twentieth of some 600 each, on a busy machine).
constexpr size_t kStreamFromBytes = 2048;

void stream(std::byte* slot, const std::byte* from, size_t bytes) {
  using V = Vector<uint8_t>;
  size_t at = 0;
  for (; at + kAlignment <= bytes; at += kAlignment) {
    for (size_t i = 0; i < kAlignment; i += kVectorBytes) {
      stream_vector(slot + at + i, load_vector<V>(from + at + i));
    }
  }
  if (at < bytes) {  // the padding is ours to write, but not the source's to read
    std::byte line[kAlignment] = {};
    __builtin_memcpy(line, from + at, bytes - at);
    for (size_t i = 0; i < kAlignment; i += kVectorBytes) {
      stream_vector(slot + at + i, load_vector<V>(line + i));
    }
  }
}

constexpr bool streams(Stores stores, size_t bytes) {
  return stores == Stores::Streaming && bytes >= kStreamFromBytes;
}

void copy_to_slot(std::byte* slot, Stores stores, const std::byte* from, size_t bytes) {
  if (streams(stores, bytes)) {
    stream(slot, from, bytes);
  } else if (bytes != 0) {
    __builtin_memcpy(slot, from, bytes);
  }
}

// -------------------------------------------------------------------------------------------------
// The fold.

template <class Format, class Op, class Scaling>
class Fold {
 public:
  // Writes to `slot` too unless it is null.
  Fold(const FoldSpec& spec, std::byte* out, std::byte* slot, bool streams,
       const std::byte* const* terms, size_t n_terms)
      : scaling_(spec),
        out_(out),
        slot_(slot),
        streams_(streams),
        terms_(terms),
        n_terms_(n_terms) {}

  void run(size_t bytes) const {
    size_t at = 0;
    constexpr size_t kStepBytes = kStepVectors * kVectorBytes;
    for (; at + kStepBytes <= bytes; at += kStepBytes) step<kStepVectors>(at);
    for (; at + kVectorBytes <= bytes; at += kVectorBytes) step<1>(at);
    if (at < bytes) last_step(at, bytes - at);
  }

 private:
  using V = Values<typename Format::Value, Format::kParts>;
  static constexpr size_t kStepVectors = 4 / Format::kParts;  // four vectors of values in registers

  template <size_t kVectors>
  void step(size_t at) const {
    V acc[kVectors];
#pragma GCC unroll 4
    for (size_t i = 0; i < kVectors; ++i) acc[i] = term(terms_[0] + at + i * kVectorBytes);
    for (size_t t = 1; t < n_terms_; ++t) {
      const std::byte* from = terms_[t] + at;
#pragma GCC unroll 4
      for (size_t i = 0; i < kVectors; ++i) combine(acc[i], term(from + i * kVectorBytes));
    }
#pragma GCC unroll 4
    for (size_t i = 0; i < kVectors; ++i) {
      const auto packed = result(acc[i]);
      store_vector(out_ + at + i * kVectorBytes, packed);
      if (slot_ != nullptr) to_slot(at + i * kVectorBytes, packed);
    }
  }

  // Less than a vector: neither reads nor writes beyond it, but for the slot's padding.
  void last_step(size_t at, size_t bytes) const {
    std::byte piece[kVectorBytes] = {};
    __builtin_memcpy(piece, terms_[0] + at, bytes);
    V acc = term(piece);
    for (size_t t = 1; t < n_terms_; ++t) {
      __builtin_memcpy(piece, terms_[t] + at, bytes);
      combine(acc, term(piece));
    }
    const auto packed = result(acc);
    store_vector(piece, packed);
    __builtin_memcpy(out_ + at, piece, bytes);
    if (slot_ != nullptr) to_slot(at, packed);
  }

  template <class Packed>
  void to_slot(size_t at, Packed packed) const {
    if (streams_) {
      stream_vector(slot_ + at, packed);
    } else {
      store_vector(slot_ + at, packed);
    }
  }

  V term(const std::byte* from) const {
    V v = Format::load(from);
    for (auto& part : v.part) part = scaling_.pre(part);
    return v;
  }
  static void combine(V& acc, V v) {
    for (size_t p = 0; p < Format::kParts; ++p) acc.part[p] = Op::apply(acc.part[p], v.part[p]);
  }
  auto result(V acc) const {
    for (auto& part : acc.part) part = scaling_.post(part);
    return Format::pack(acc);
  }

  Scaling scaling_;
  std::byte* out_;
  std::byte* slot_;
  bool streams_;
  const std::byte* const* terms_;
  size_t n_terms_;
};

template <class Format, class Op, class Scaling>
void fold_as(const FoldSpec& spec, std::byte* out, std::byte* slot, Stores stores,
             const std::byte* const* terms, size_t n_terms, size_t bytes) {
  Fold<Format, Op, Scaling>(spec, out, slot, streams(stores, bytes), terms, n_terms).run(bytes);
}

// -------------------------------------------------------------------------------------------------
// The table.

// Complex numbers are read and scaled as their parts.
template <DType kDType>
auto format_of() {
  // clang-format off
  if constexpr (kDType == DType::UInt8) return Plain<uint8_t>{};
  else if constexpr (kDType == DType::Int8) return Plain<int8_t>{};
  else if constexpr (kDType == DType::UInt16) return Plain<uint16_t>{};
  else if constexpr (kDType == DType::Int16) return Plain<int16_t>{};
  else if constexpr (kDType == DType::Int32) return Plain<int32_t>{};
  else if constexpr (kDType == DType::Int64) return Plain<int64_t>{};
  else if constexpr (kDType == DType::Float16) return Float16{};
  else if constexpr (kDType == DType::Bool) return Bool{};
  else if constexpr (kDType == DType::BFloat16) return BFloat16{};
  else if constexpr (kDType == DType::Float32 || kDType == DType::Complex64) return Plain<float>{};
  else if constexpr (kDType == DType::Float64 || kDType == DType::Complex128) return Plain<double>{};
  // clang-format on
}

// Complex numbers are added as their parts.
template <DTypeClass kClass, ReduceOp kOp, class T>
auto op_of() {
  if constexpr (kClass == DTypeClass::Bool) {
    return std::conditional_t<kOp == ReduceOp::Sum || kOp == ReduceOp::Max, Or, And>{};
  } else if constexpr (kOp == ReduceOp::Sum || kOp == ReduceOp::Average) {
    return Sum<T>{};
  } else if constexpr (kOp == ReduceOp::Min) {
    return Min<T>{};
  } else if constexpr (kOp == ReduceOp::Max) {
    return Max<T>{};
  } else if constexpr (kClass == DTypeClass::Complex) {
    return ComplexProduct<T>{};
  } else {
    return Product<T>{};
  }
}

// A FoldFn, but with bytes for elements.
using BytesFn = void (*)(const FoldSpec&, std::byte*, std::byte*, Stores, const std::byte* const*,
                         size_t, size_t);

struct Entry {
  BytesFn unscaled = nullptr;
  BytesFn scaled = nullptr;
};

template <size_t kIndex>
constexpr Entry entry() {
  constexpr DType kDType{kIndex / kReduceOps.size()};
  constexpr ReduceOp kOp{kIndex % kReduceOps.size()};
  if constexpr (!reduces(kOp, kDType) || kOp == ReduceOp::Adasum) {  // that is no fold
    return {};
  } else {
    constexpr DTypeClass kClass = info(kDType).kind;
    using Format = decltype(format_of<kDType>());
    using T = typename Format::Value;
    using Op = decltype(op_of<kClass, kOp, T>());
    constexpr BytesFn kUnscaled = fold_as<Format, Op, Unscaled<T>>;
    if constexpr (kClass == DTypeClass::Bool) {
      return {kUnscaled, kUnscaled};
    } else {
      return {kUnscaled, fold_as<Format, Op, Scaled<T>>};
    }
  }
}

struct Table {
  Entry entries[kDTypes.size()][kReduceOps.size()];
  uint8_t sizes[kDTypes.size()];
};

template <size_t... kIndices>
constexpr Table make_table(std::index_sequence<kIndices...>) {
  Table table{};
  ((table.entries[kIndices / kReduceOps.size()][kIndices % kReduceOps.size()] = entry<kIndices>()),
   ...);
  for (size_t i = 0; i < kDTypes.size(); ++i) table.sizes[i] = kDTypes[i].size;
  return table;
}

constexpr Table kTable = make_table(std::make_index_sequence<kDTypes.size() * kReduceOps.size()>());

void fold(const FoldSpec& spec, std::byte* out, std::byte* slot, Stores stores,
          const std::byte* const* terms, size_t n_terms, size_t count) {
  const auto dtype = static_cast<size_t>(spec.dtype);
  const Entry& entry = kTable.entries[dtype][static_cast<size_t>(spec.op)];
  const bool scaled = spec.prescale != 1.0 || spec.postscale != 1.0 || spec.divisor != 1;
  (scaled ? entry.scaled : entry.unscaled)(spec, out, slot, stores, terms, n_terms,
                                           count * kTable.sizes[dtype]);
}

}  // namespace
}  // namespace horovod
