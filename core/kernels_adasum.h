// L1: the arithmetic of Adasum on vectors, a part of kernels_body.h and under its rules. Must not
// know ranks or which vectors are merged.
//
// Vectors are walked in tiles that stay in the first cache. A tile is widened to double, term by
// term; the loops are written for the compiler to make vectors of them.
#pragma once

#include "kernels_body.h"

namespace horovod {
namespace {

constexpr size_t kTile = 256;  // elements
constexpr size_t kLanes = 8;   // of every product's sum, whatever the instruction set

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof from);
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// To the nearest float but, if that isn't exact, to the neighbour whose last bit is 1: rounding
// that to 16 bits gives what rounding the double to 16 bits would.
uint32_t round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = nearest;
  const bool outward = __builtin_fabs(back) > __builtin_fabs(x);
  return (bits_as<uint32_t>(nearest) - (outward ? 1 : 0)) | (back != x ? 1 : 0);
}

// The formats of Adasum: one element at a time, unlike those above.
template <class T>
struct PlainElement {
  using Storage = T;
  static double widen(T x) { return x; }
  static T narrow(double x) { return static_cast<T>(x); }
};

struct BFloat16Element {
  using Storage = uint16_t;
  static double widen(uint16_t x) { return bits_as<float>(static_cast<uint32_t>(x) << 16); }
  static uint16_t narrow(double x) {
    const uint32_t bits = round_to_odd(x);
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return static_cast<uint16_t>((x == x ? rounded : bits | 0x400000) >> 16);
  }
};

struct Float16Element {
  using Storage = uint16_t;
  // A half's exponent and fraction, put where a float has them, are a float 2^-112 times as large.
  static double widen(uint16_t x) {
    const uint32_t magnitude = (x & 0x7fffu) << 13, sign = (x & 0x8000u) << 16;
    const float number = bits_as<float>(magnitude) * 0x1p112f;
    const uint32_t bits = magnitude < (31u << 23) ? bits_as<uint32_t>(number)
                                                  : magnitude | 0x7f800000;  // infinite or NaN
    return bits_as<float>(bits | sign);
  }
  static uint16_t narrow(double x) {  // as Float16::narrow
    const uint32_t odd = round_to_odd(x), sign = odd >> 16 & 0x8000;
    const auto magnitude = static_cast<int32_t>(odd & 0x7fffffff);
    const int32_t rounded = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const int32_t normal = rounded < 0x7c00 ? rounded : 0x7c00;
    const int32_t subnormal = bits_as<int32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000;
    const int32_t number = magnitude < (113 << 23) ? subnormal : normal;
    return static_cast<uint16_t>((x == x ? static_cast<uint32_t>(number) : 0x7e00) | sign);
  }
};

// Elements [at, at + count) of a combination, and zeros up to the end of the tile.
template <class Element>
void fill(double* tile, const Combination& x, size_t at, size_t count) {
  using T = typename Element::Storage;
  T raw[kTile];
  if (count < kTile) __builtin_memset(raw, 0, sizeof raw);
  for (size_t t = 0; t < x.n; ++t) {
    const std::byte* from = x.terms[t] + at * sizeof(T);
    const double factor = x.factors[t];
    if (count == kTile) {
      __builtin_memcpy(raw, from, sizeof raw);
    } else {
      __builtin_memcpy(raw, from, count * sizeof(T));
    }
    if (t == 0) {
      for (size_t i = 0; i < kTile; ++i) tile[i] = factor * Element::widen(raw[i]);
    } else {
      for (size_t i = 0; i < kTile; ++i) tile[i] += factor * Element::widen(raw[i]);
    }
  }
  for (size_t i = count; i < kTile; ++i) tile[i] = 0;  // also where a factor isn't finite
}

// Element i is added in lane i % kLanes.
struct Lanes {
  static constexpr size_t kVectors = kLanes * sizeof(double) / kVectorBytes;
  Vector<double> sums[kVectors] = {};

  void add_product(const double* x, const double* y) {
    for (size_t v = 0; v < kVectors; ++v) {
      const size_t at = v * kVectorBytes;
      sums[v] += load_vector<Vector<double>>(reinterpret_cast<const std::byte*>(x) + at) *
                 load_vector<Vector<double>>(reinterpret_cast<const std::byte*>(y) + at);
    }
  }
  void add(const Lanes& other) {
    for (size_t v = 0; v < kVectors; ++v) sums[v] += other.sums[v];
  }
  double total() const {
    double lanes[kLanes];
    __builtin_memcpy(lanes, sums, sizeof lanes);
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    return sum;
  }
};

template <class Element>
Products products_as(const Combination& x, const Combination& y, size_t count) {
  Lanes xy, xx, yy;
  for (size_t at = 0; at < count; at += kTile) {
    const size_t n = count - at < kTile ? count - at : kTile;
    double a[kTile], b[kTile];
    fill<Element>(a, x, at, n);
    fill<Element>(b, y, at, n);
    Lanes ab, aa, bb;  // of the tile alone: the fewer terms a sum has, the less it rounds
    for (size_t i = 0; i < kTile; i += kLanes) {
      ab.add_product(a + i, b + i);
      aa.add_product(a + i, a + i);
      bb.add_product(b + i, b + i);
    }
    xy.add(ab);
    xx.add(aa);
    yy.add(bb);
  }
  return {xy.total(), xx.total(), yy.total()};
}

template <class Element>
void combine_as(std::byte* out, const Combination& x, size_t count) {
  using T = typename Element::Storage;
  for (size_t at = 0; at < count; at += kTile) {
    const size_t n = count - at < kTile ? count - at : kTile;
    double tile[kTile];
    fill<Element>(tile, x, at, n);
    T raw[kTile];
    for (size_t i = 0; i < kTile; ++i) raw[i] = Element::narrow(tile[i]);
    __builtin_memcpy(out + at * sizeof(T), raw, n * sizeof(T));
  }
}

Products products(DType dtype, const Combination& x, const Combination& y, size_t count) {
  switch (dtype) {
    case DType::Float16:
      return products_as<Float16Element>(x, y, count);
    case DType::BFloat16:
      return products_as<BFloat16Element>(x, y, count);
    case DType::Float32:
      return products_as<PlainElement<float>>(x, y, count);
    default:
      return products_as<PlainElement<double>>(x, y, count);
  }
}

void combine(DType dtype, std::byte* out, const Combination& x, size_t count) {
  switch (dtype) {
    case DType::Float16:
      return combine_as<Float16Element>(out, x, count);
    case DType::BFloat16:
      return combine_as<BFloat16Element>(out, x, count);
    case DType::Float32:
      return combine_as<PlainElement<float>>(out, x, count);
    default:
      return combine_as<PlainElement<double>>(out, x, count);
  }
}

}  // namespace
}  // namespace horovod
