// The laws of Adasum's tree and factors, and of the work on all chunks stepped in a loop: no
// engines, no transport.
#include "core/adasum.h"

#include <cmath>
#include <cstddef>
#include <memory>
#include <random>
#include <vector>

#include "check.h"

namespace horovod {
namespace {

using Pairs = std::vector<AdasumPair>;

void test_the_tree() {
  CHECK(adasum_levels(1).empty());
  CHECK(adasum_levels(2) == std::vector<Pairs>({{{0, 1, 2}}}));
  CHECK(adasum_levels(3) == std::vector<Pairs>({{{0, 1, 2}}, {{0, 2, 3}}}));
  CHECK(
      adasum_levels(7) ==
      std::vector<Pairs>({{{0, 1, 2}, {2, 3, 4}, {4, 5, 6}}, {{0, 2, 4}, {4, 6, 7}}, {{0, 4, 7}}}));
  for (size_t n = 1; n < 70; ++n) {
    // Each level's pairs are made of whole vectors of the level below, and one is left.
    std::vector<size_t> ends;
    for (size_t r = 0; r <= n; ++r) ends.push_back(r);
    for (const Pairs& pairs : adasum_levels(n)) {
      std::vector<size_t> merged{0};
      for (size_t i = 0; i < pairs.size(); ++i) {
        CHECK_EQ(pairs[i].first, ends[2 * i]);
        CHECK_EQ(pairs[i].middle, ends[2 * i + 1]);
        CHECK_EQ(pairs[i].last, ends[2 * i + 2]);
        merged.push_back(pairs[i].last);
      }
      if (ends.size() % 2 == 0) merged.push_back(n);
      ends = merged;
    }
    CHECK_EQ(ends.size(), 2u);
  }
}

void test_the_factors() {
  // 2 and 3 ranks; a.b = 12, |a|^2 = 8, |b|^2 = 24.
  std::vector<double> factors{1, 2, 3, 4, 5, 6};
  adasum_merge({1, 3, 6}, {12, 8, 24}, factors);
  const double a = 1 - 2.0 / 5 * 12 / 8, b = 1 - 3.0 / 5 * 12 / 24;
  CHECK(factors == std::vector<double>({1, 2 * a, 3 * a, 4 * b, 5 * b, 6 * b}));
  // A vector whose square is next to nothing counts as zero, one that isn't finite does not.
  factors = {1, 1};
  adasum_merge({0, 1, 2}, {1e-154, 1e-155, 1e-153}, factors);
  CHECK_EQ(factors[0], 1.0);
  CHECK(factors[1] != 1.0);
  const double nan = std::nan("");
  adasum_merge({0, 1, 2}, {nan, nan, 1}, factors);
  CHECK(std::isnan(factors[0]) && std::isnan(factors[1]));
}

struct Rank {
  std::vector<std::vector<double>> results;  // by tensor
  std::unique_ptr<Adasum> work;
};

// All ranks of an Adasum of equal vectors; every call does a bounded piece.
void test_the_work(size_t n, const std::vector<size_t>& counts, const char* simd) {
  std::mt19937_64 rng(n);
  std::vector<std::vector<double>> tensors;
  for (const size_t count : counts) {
    std::vector<double>& tensor = tensors.emplace_back(count);
    for (double& x : tensor) x = static_cast<double>(rng() % 1000);
  }
  std::vector<Rank> ranks(n);
  for (size_t r = 0; r < n; ++r) {
    std::vector<Adasum::Chunk> chunks;
    ranks[r].results.reserve(tensors.size());
    for (const std::vector<double>& tensor : tensors) {
      const size_t begin = tensor.size() * r / n, end = tensor.size() * (r + 1) / n;
      std::vector<double>& result = ranks[r].results.emplace_back(end - begin);
      const auto* values = reinterpret_cast<const std::byte*>(tensor.data() + begin);
      chunks.push_back({.terms = std::vector<const std::byte*>(n, values),
                        .out = reinterpret_cast<std::byte*>(result.data()),
                        .dtype = DType::Float64,
                        .count = end - begin});
    }
    ranks[r].work = std::make_unique<Adasum>(kernels(simd), std::move(chunks), n);
    ranks[r].work->scale(4);
  }
  for (size_t level = 0; level < adasum_levels(n).size(); ++level) {
    std::vector<double> all;
    for (Rank& rank : ranks) {
      CHECK(!rank.work->merged());
      while (!rank.work->multiply()) {
      }
      all.insert(all.end(), rank.work->products().begin(), rank.work->products().end());
    }
    for (Rank& rank : ranks) rank.work->merge(all);
  }
  for (size_t r = 0; r < n; ++r) {
    CHECK(ranks[r].work->merged());
    ranks[r].work->scale(0.25);
    while (!ranks[r].work->combine()) {
    }
    for (size_t t = 0; t < tensors.size(); ++t) {
      const size_t begin = tensors[t].size() * r / n;
      for (size_t i = 0; i < ranks[r].results[t].size(); ++i) {
        CHECK(std::abs(ranks[r].results[t][i] - tensors[t][begin + i]) < 1e-9);
      }
    }
  }
}

}  // namespace
}  // namespace horovod

int main() {
  horovod::test_the_tree();
  horovod::test_the_factors();
  for (const char* simd : {"baseline", "auto"}) {
    for (const size_t n : {1, 2, 3, 5, 8}) {
      horovod::test_the_work(n, {0, 1, 3, 700, 150'000, 7}, simd);
    }
    // Many more blocks than one call does.
    horovod::test_the_work(2, {1'500'000}, simd);
  }
}
