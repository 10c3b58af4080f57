// The laws of the id table that ranks and coordinator hold.
#include "core/cache.h"

#include <random>
#include <set>
#include <string>

#include "check.h"

namespace horovod {
namespace {

Request request(const std::string& name, uint32_t set = 0, int64_t size = 4) {
  Request r;
  r.name = name;
  r.set = set;
  r.tensors = {{DType::Float32, {size}}};
  return r;
}

void what_was_learned_is_found() {
  NameCache cache(8);
  CHECK_EQ(cache.find(request("a")), 0u);
  cache.learn(1, request("a"));
  CHECK_EQ(cache.find(request("a")), 1u);
  CHECK_EQ(*cache.name(1), "a");
  CHECK(*cache.request(1) == request("a"));
  CHECK(cache.name(2) == nullptr);
}

void names_of_different_sets_are_different() {
  NameCache cache(8);
  cache.learn(1, request("a", 0));
  cache.learn(2, request("a", 7));
  CHECK_EQ(cache.find(request("a", 0)), 1u);
  CHECK_EQ(cache.find(request("a", 7)), 2u);
  cache.forget_set(7);
  CHECK_EQ(cache.find(request("a", 0)), 1u);
  CHECK_EQ(cache.find(request("a", 7)), 0u);
}

void a_changed_call_is_announced_in_full_and_replaces_the_old() {
  NameCache cache(8);
  cache.learn(1, request("a", 0, 4));
  CHECK_EQ(cache.find(request("a", 0, 5)), 0u);
  cache.learn(2, request("a", 0, 5));
  CHECK_EQ(cache.find(request("a", 0, 5)), 2u);
  CHECK(cache.name(1) == nullptr);
  CHECK_EQ(cache.size(), 1u);
}

void unnamed_calls_are_not_kept() {
  NameCache cache(8);
  Request unnamed = request("allreduce.noname.1");
  unnamed.unnamed = true;
  cache.learn(1, unnamed);
  CHECK_EQ(cache.size(), 0u);
  CHECK_EQ(cache.find(unnamed), 0u);
}

void the_one_longest_without_an_entry_goes() {
  NameCache cache(2);
  cache.learn(1, request("a"));
  cache.learn(2, request("b"));
  cache.learn(1, request("a"));
  cache.learn(3, request("c"));
  CHECK_EQ(cache.find(request("a")), 1u);
  CHECK_EQ(cache.find(request("b")), 0u);
  CHECK_EQ(cache.find(request("c")), 3u);
}

void an_announced_id_stays_until_its_entry() {
  NameCache cache(1);
  cache.learn(1, request("a"));
  CHECK_EQ(cache.find(request("a")), 1u);
  for (uint64_t id = 2; id < 9; ++id) cache.learn(id, request(std::to_string(id)));
  CHECK_EQ(*cache.name(1), "a");
  CHECK_EQ(*cache.name(8), "8");
  CHECK_EQ(cache.size(), 2u);
  cache.learn(1, request("a"));
  cache.learn(9, request("9"));
  CHECK(cache.name(1) == nullptr);
  CHECK_EQ(cache.size(), 1u);
}

void a_forgotten_id_is_gone() {
  NameCache cache(4);
  cache.learn(1, request("a"));
  CHECK_EQ(cache.find(request("a")), 1u);
  cache.forget(1);
  cache.forget(1);
  CHECK_EQ(cache.find(request("a")), 0u);
  CHECK(cache.request(1) == nullptr);
  CHECK_EQ(cache.size(), 0u);
}

void capacity_zero_keeps_nothing() {
  NameCache cache(0);
  cache.learn(1, request("a"));
  CHECK_EQ(cache.find(request("a")), 0u);
  CHECK_EQ(cache.size(), 0u);
}

// Against a table that is nothing but its definition.
void a_random_life_keeps_the_bound_and_the_truth() {
  std::mt19937_64 rng(1);
  for (size_t capacity = 1; capacity < 6; ++capacity) {
    NameCache cache(capacity);
    std::set<uint64_t> announced;
    uint64_t next = 1;
    for (int step = 0; step < 20000; ++step) {
      const Request r = request(std::to_string(rng() % 10), rng() % 2, 1 + int64_t(rng() % 2));
      const uint64_t id = cache.find(r);
      if (id != 0) {
        CHECK(*cache.request(id) == r);
        announced.insert(id);
      }
      if (rng() % 3 == 0) {
        cache.learn(id != 0 ? id : next++, r);
        announced.erase(id);
      } else if (rng() % 7 == 0) {
        cache.forget(id);
        announced.erase(id);
      }
      std::erase_if(announced, [&](uint64_t a) { return cache.name(a) == nullptr; });  // replaced
      CHECK(cache.size() <= capacity + announced.size());
    }
  }
}

}  // namespace
}  // namespace horovod

int main() {
  using namespace horovod;
  what_was_learned_is_found();
  names_of_different_sets_are_different();
  a_changed_call_is_announced_in_full_and_replaces_the_old();
  unnamed_calls_are_not_kept();
  the_one_longest_without_an_entry_goes();
  an_announced_id_stays_until_its_entry();
  a_forgotten_id_is_gone();
  capacity_zero_keeps_nothing();
  a_random_life_keeps_the_bound_and_the_truth();
}
