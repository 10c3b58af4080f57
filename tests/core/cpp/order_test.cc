// The rules of the coordinator about fusion, ids and when an entry is made, one test each.
#include "lab.h"

namespace horovod {
namespace {

using namespace lab;

// ---- Fusion ------------------------------------------------------------------------------------

Names fused(const std::vector<Request>& requests,
            const std::function<void(CoordinatorOptions&)>& change = {}) {
  Lab lab(2, change);
  for (const Request& r : requests) lab.all_announce(r, false);
  lab.wait(1ms);
  return names(lab.entries().front());
}

Request scaled(const std::string& name, double prescale, double postscale, ReduceOp op) {
  Request r = call(name);
  r.prescale = prescale;
  r.postscale = postscale;
  r.op = op;
  return r;
}

void equal_work_fuses() {
  Request other = call("b");
  other.tensors[0].dtype = DType::Int64;
  CHECK((fused({call("a"), other, call("c", OpKind::Allreduce, {99})}) == Names{"a", "b", "c"}));
}

void different_work_does_not_fuse_and_is_looked_past() {
  const Request a = scaled("a", 1, 1, ReduceOp::Sum);
  const Request last = scaled("z", 1, 1, ReduceOp::Sum);
  CHECK((fused({a, scaled("b", 2, 1, ReduceOp::Sum), last}) == Names{"a", "z"}));
  CHECK((fused({a, scaled("b", 1, 2, ReduceOp::Sum), last}) == Names{"a", "z"}));
  CHECK((fused({a, scaled("b", 1, 1, ReduceOp::Average), last}) == Names{"a", "z"}));
}

void the_limit_counts_aligned_bytes() {
  const auto limit = [](uint64_t bytes) {
    return [bytes](CoordinatorOptions& o) { o.fusion_threshold_bytes = bytes; };
  };
  const std::vector<Request> calls = {call("a"), call("b"), call("c", OpKind::Allreduce, {17}),
                                      call("d")};
  CHECK((fused(calls, limit(63)) == Names{"a"}));
  CHECK((fused(calls, limit(127)) == Names{"a"}));
  CHECK((fused(calls, limit(128)) == Names{"a", "b"}));
  CHECK((fused(calls, limit(192)) == Names{"a", "b", "d"}));  // c doesn't fit, d does
  CHECK((fused(calls, limit(320)) == Names{"a", "b", "c", "d"}));
  CHECK((fused(calls, limit(0)) == Names{"a"}));
  CHECK((fused(calls, [](auto& o) { o.max_entry_bytes = 128; }) == Names{"a", "b"}));
}

void a_group_is_never_split_and_may_have_neighbours() {
  Request group = call("g");
  group.tensors.assign(3, {DType::Float32, {4}});
  const std::vector<Request> calls = {call("a"), group, call("b")};
  CHECK((fused(calls) == Names{"a", "g", "b"}));
  CHECK((fused(calls, [](auto& o) { o.fusion_threshold_bytes = 192; }) == Names{"a", "b"}));
  CHECK((fused({group, call("b")}, [](auto& o) { o.fusion_threshold_bytes = 64; }) == Names{"g"}));
  const auto apart = [](CoordinatorOptions& o) { o.disable_group_fusion = true; };
  CHECK((fused({group, call("b")}, apart) == Names{"g"}));
  CHECK((fused({call("b"), call("c")}, apart) == Names{"b", "c"}));
}

void only_equal_contributors_fuse() {
  Lab lab(3);
  lab.all_announce(call("a"), false);
  lab.announce(1, call("b"), false);
  lab.announce(0, call("b"), false);
  lab.announce(2, join_call(), false);
  lab.wait(1ms);
  const auto all = lab.entries();
  CHECK_EQ(all.size(), 2u);
  CHECK((all[0].contributors == Ranks{0, 1, 2}));
  CHECK((all[1].contributors == Ranks{0, 1}));
}

void the_plan_caps_an_entry_but_never_refuses_a_call() {
  CHECK((fused({call("huge", OpKind::Allreduce, {int64_t{1} << 40}), call("b")}) == Names{"huge"}));
}

// ---- When --------------------------------------------------------------------------------------

void a_call_waits_for_company_for_a_millisecond() {
  Lab lab(2);
  lab.all_announce(call("x"), false);
  lab.silent();
  CHECK(lab.deadline() == 1ms);
  lab.wait(999us);
  lab.silent();
  lab.wait(1us);
  lab.good_entry();
}

void a_blocked_contributor_ends_the_wait() {
  Lab lab(2);
  lab.announce(0, call("x"), false);
  lab.announce(1, call("x"), true);
  lab.good_entry();
}

void a_caller_that_starts_to_wait_ends_the_wait() {
  Lab lab(2);
  lab.all_announce(call("x"), false);
  lab.silent();
  lab.say(1, Blocked{0, "x"});
  lab.say(1, Blocked{0, "x"});
  lab.say(1, Blocked{0, "unknown"});
  lab.say(1, Blocked{9, "x"});
  lab.good_entry();
  lab.all_announce(call("y"), false);  // nobody is blocked any more
  lab.silent();
}

void a_rank_blocked_elsewhere_still_hurries_what_is_ready() {
  Lab lab(3);
  lab.announce(1, call("lonely"), true);
  lab.all_announce(call("x"), false);
  CHECK(names(lab.good_entry()) == Names{"x"});
  lab.silent();
}

void an_outsider_that_is_blocked_hurries_nobody() {
  Lab lab(3);
  const uint32_t set = lab.add_set({0, 1});
  lab.announce(2, call("lonely"), true);
  for (int32_t rank : {0, 1}) lab.announce(rank, in_set(call("x"), set), false);
  lab.silent();
}

void a_joined_rank_hurries_nobody() {
  Lab lab(3);
  lab.announce(2, join_call(), true);
  for (int32_t rank : {0, 1}) lab.announce(rank, call("x"), false);
  lab.silent();
  lab.wait(1ms);
  lab.good_entry();
}

void enough_bytes_end_the_wait() {
  Lab lab(2, [](auto& o) { o.flush_bytes = 192; });
  lab.all_announce(call("x"), false);
  lab.all_announce(call("y"), false);
  lab.silent();
  lab.all_announce(call("z"), false);
  CHECK((names(lab.good_entry()) == Names{"x", "y", "z"}));
}

void what_cannot_fuse_does_not_wait() {
  for (OpKind kind :
       {OpKind::Allgather, OpKind::Broadcast, OpKind::Alltoall, OpKind::Reducescatter}) {
    Lab lab(2);
    lab.all_announce(call("a"), false);
    lab.all_announce(call("x", kind), false);
    CHECK(names(lab.good_entry()) == Names{"x"});  // and "a" goes on waiting for company
  }
  Lab lab(2, [](auto& o) { o.fusion_threshold_bytes = 0; });
  lab.all_announce(call("x"), false);
  lab.good_entry();
}

void two_entries_of_a_set_are_in_flight() {
  Lab lab(2, [](auto& o) { o.fusion_threshold_bytes = 0; });
  for (int i = 0; i < 4; ++i) lab.all_announce(call(std::to_string(i)));
  const auto first = lab.entries();
  CHECK_EQ(first.size(), 2u);
  lab.say(1, Done{first[0].seq});  // not the one who reports
  lab.say(0, Done{999});
  lab.silent();
  CHECK(!lab.deadline() || *lab.deadline() > 1s);
  lab.done(first[0]);
  CHECK_EQ(lab.entries().size(), 1u);
  lab.done(first[0]);  // only once
  lab.silent();
  lab.done(first[1]);
  CHECK_EQ(lab.entries().size(), 1u);
}

void disjoint_sets_do_not_wait_for_each_other() {
  Lab lab(4, [](auto& o) { o.fusion_threshold_bytes = 0; });
  const uint32_t left = lab.add_set({0, 1}), right = lab.add_set({2, 3});
  for (int i = 0; i < 3; ++i) {
    for (int32_t rank : {0, 1}) lab.announce(rank, in_set(call(std::to_string(i)), left));
  }
  CHECK_EQ(lab.entries().size(), 2u);
  for (int32_t rank : {2, 3}) lab.announce(rank, in_set(call("0"), right));
  CHECK((lab.good_entry().contributors == Ranks{2, 3}));
}

void control_ops_and_errors_pass_a_full_set() {
  Lab lab(2, [](auto& o) { o.fusion_threshold_bytes = 0; });
  for (int i = 0; i < 3; ++i) lab.all_announce(call(std::to_string(i)));
  CHECK_EQ(lab.entries().size(), 2u);
  lab.all_announce(call("b", OpKind::Barrier));
  CHECK(lab.good_entry().kind == OpKind::Barrier);
  lab.announce(0, call("x"));
  lab.announce(1, call("x", OpKind::Allreduce, {5}));
  lab.error();
}

void deliberate_cycles_wait_even_for_the_blocked() {
  Lab lab(2, [](auto& o) {
    o.min_cycle = 50ms;
    o.fusion_threshold_bytes = 128;
  });
  lab.all_announce(call("x"));
  lab.silent();
  CHECK(lab.deadline() == 50ms);
  lab.wait(50ms);
  lab.done(lab.good_entry());
  lab.all_announce(call("x"));
  lab.silent();
  lab.all_announce(call("y"));  // a whole entry is full
  CHECK_EQ(lab.good_entry().items.size(), 2u);
}

// ---- Ids ---------------------------------------------------------------------------------------

void an_id_replaces_the_name_once_all_use_it() {
  Lab lab(2);
  const Entry first = lab.run(call("x"));
  const uint64_t id = first.items[0].id;
  CHECK(id != 0);
  CHECK_EQ(first.items[0].name, "x");
  lab.say(0, AnnounceCached{id, true, {}});
  lab.announce(1, call("x"));
  const Entry second = lab.good_entry();
  CHECK_EQ(second.items[0].id, id);
  CHECK_EQ(second.items[0].name, "x");  // rank 1 didn't use the id
  for (int32_t rank : {0, 1}) lab.say(rank, AnnounceCached{id, true, {}});
  const Entry third = lab.good_entry();
  CHECK_EQ(third.items[0].id, id);
  CHECK_EQ(third.items[0].name, "");
  CHECK_EQ(lab.coordinator().counters().cached_announcements, 3u);
}

void a_changed_call_gets_a_new_id() {
  Lab lab(2);
  const uint64_t id = lab.run(call("x")).items[0].id;
  const uint64_t changed = lab.run(call("x", OpKind::Allreduce, {5})).items[0].id;
  CHECK(changed > id);
  CHECK(lab.run(call("x")).items[0].id > changed);
  lab.say(0, AnnounceCached{id, true, {}});  // gone
  const auto out = lab.decide();
  CHECK_EQ(std::get<Resend>(out.at(0).decision).id, id);
}

void a_cached_id_is_only_an_abbreviation() {
  Lab lab(2);
  const uint64_t id = lab.run(call("x")).items[0].id;
  lab.say(0, AnnounceCached{id, true, {}});
  lab.announce(1, call("x", OpKind::Allreduce, {5}));
  CHECK(contains(lab.error().text, "shape: rank 0 sent [4], rank 1 [5]"));
}

void unnamed_calls_and_control_ops_have_no_id() {
  Lab lab(2);
  Request unnamed = call("noname.1");
  unnamed.unnamed = true;
  CHECK_EQ(lab.run(unnamed).items[0].id, 0u);
  CHECK_EQ(lab.run(call("b", OpKind::Barrier)).items[0].id, 0u);
  Lab without(2, [](auto& o) { o.cache_capacity = 0; });
  CHECK_EQ(without.run(call("x")).items[0].id, 0u);
}

void an_evicted_id_is_asked_for_in_full() {
  Lab lab(2, [](auto& o) { o.cache_capacity = 2; });
  const uint64_t x = lab.run(call("x")).items[0].id;
  const uint64_t y = lab.run(call("y")).items[0].id;
  lab.run(call("x"));
  lab.run(call("z"));  // y is the one longest without an entry
  lab.say(0, AnnounceCached{x, true, {}});
  lab.say(0, AnnounceCached{y, true, {}});
  const auto out = lab.decide();
  CHECK_EQ(out.size(), 1u);
  CHECK((out[0].to == Ranks{0}));
  CHECK_EQ(std::get<Resend>(out[0].decision).id, y);
  lab.announce(0, call("y"));
  lab.announce(1, call("y"));
  CHECK(lab.good_entry().items[0].id > y);
}

void a_join_waits_for_calls_that_are_resent() {
  Lab lab(2, [](auto& o) { o.cache_capacity = 1; });
  const uint64_t x = lab.run(call("x")).items[0].id;
  lab.run(call("y"));
  lab.announce(1, call("x"));
  lab.say(0, AnnounceCached{x, false, {}});
  CHECK(std::holds_alternative<Resend>(lab.decide().at(0).decision));
  lab.announce(0, join_call(), false);
  lab.say(0, Blocked{0, "join"});
  lab.silent();  // rank 0 takes part in x
  lab.say(0, Announce{call("x"), false, x, {}});
  CHECK((lab.good_entry().contributors == Ranks{0, 1}));
  lab.announce(1, call("y"));
  CHECK((lab.good_entry().contributors == Ranks{1}));
}

void an_id_evicted_while_announced_comes_back_as_another() {
  Lab lab(2, [](auto& o) { o.cache_capacity = 1; });
  const uint64_t x = lab.run(call("x")).items[0].id;
  for (int32_t rank : {0, 1}) lab.say(rank, AnnounceCached{x, false, {}});
  lab.all_announce(call("y", OpKind::Broadcast), false);
  CHECK(names(lab.good_entry()) == Names{"y"});
  lab.wait(1ms);
  const Entry entry = lab.good_entry();
  CHECK(entry.items[0].id > x);
  CHECK_EQ(entry.items[0].name, "x");
}

// ---- Terms -------------------------------------------------------------------------------------

void carries(CoordinatorOptions& options) { options.inline_bytes = 8; }

void an_entry_carries_what_all_have_sent() {
  Lab lab(2, carries);
  lab.announce(1, call("x"), true, "beta");
  lab.announce(0, call("x"), true, "alfa");
  const Entry first = lab.good_entry();
  CHECK_EQ(first.terms, "alfabeta");
  for (int32_t rank : {1, 0}) {
    lab.say(rank, AnnounceCached{first.items[0].id, true, rank == 0 ? "a" : "b"});
  }
  CHECK_EQ(lab.good_entry().terms, "ab");
}

void an_entry_without_data_is_not_in_flight() {
  Lab lab(2, carries);
  for (int i = 0; i < 5; ++i) {
    for (int32_t rank : {0, 1}) lab.announce(rank, call("x"), true, "abcd");
    CHECK_EQ(lab.good_entry().terms.size(), 8u);  // nobody has said Done
  }
}

void terms_are_complete_and_small_or_left_out() {
  for (const auto& [of_0, of_1] :
       {std::pair("abcd", ""), {"", "abcd"}, {"abc", "abcd"}, {"abcde", "abcde"}, {"", ""}}) {
    Lab lab(2, carries);
    lab.announce(0, call("x"), true, of_0);
    lab.announce(1, call("x"), true, of_1);
    const Entry entry = lab.good_entry();
    CHECK_EQ(entry.terms, "");
    lab.done(entry);
  }
  Lab none(2);
  for (int32_t rank : {0, 1}) none.announce(rank, call("x"), true, "a");
  CHECK_EQ(none.good_entry().terms, "");
}

void fused_calls_carry_all_terms_or_none() {
  const auto fuse = [](const std::string& payload_of_b) {
    Lab lab(2, carries);
    for (int32_t rank : {0, 1}) {
      lab.announce(rank, call("a"), false, rank == 0 ? "A0" : "A1");
      lab.announce(rank, call("b"), false, payload_of_b);
    }
    lab.wait(1ms);
    Entry entry = lab.good_entry();
    CHECK_EQ(entry.items.size(), 2u);
    return entry.terms;
  };
  CHECK_EQ(fuse("bb"), "A0bbA1bb");
  CHECK_EQ(fuse("bbb"), "");  // of both more than may be
  CHECK_EQ(fuse(""), "");
}

void terms_are_those_of_the_contributors() {
  Lab lab(3, carries);
  lab.announce(1, join_call(), false);
  lab.announce(2, call("x"), true, "22");
  lab.announce(0, call("x"), true, "00");
  const Entry entry = lab.good_entry();
  CHECK((entry.contributors == Ranks{0, 2}));
  CHECK_EQ(entry.terms, "0022");
}

void a_disagreement_carries_nothing() {
  Lab lab(2, carries);
  lab.announce(0, call("x"), true, "aaaa");
  lab.announce(1, call("x", OpKind::Allreduce, {5}), true, "bbbb");
  const Entry entry = lab.entry();
  CHECK(entry.status.kind == ErrorKind::Mismatch);
  CHECK_EQ(entry.terms, "");
}

}  // namespace
}  // namespace horovod

int main() {
  using namespace horovod;
  equal_work_fuses();
  different_work_does_not_fuse_and_is_looked_past();
  the_limit_counts_aligned_bytes();
  a_group_is_never_split_and_may_have_neighbours();
  only_equal_contributors_fuse();
  the_plan_caps_an_entry_but_never_refuses_a_call();
  a_call_waits_for_company_for_a_millisecond();
  a_blocked_contributor_ends_the_wait();
  a_caller_that_starts_to_wait_ends_the_wait();
  a_rank_blocked_elsewhere_still_hurries_what_is_ready();
  an_outsider_that_is_blocked_hurries_nobody();
  a_joined_rank_hurries_nobody();
  enough_bytes_end_the_wait();
  what_cannot_fuse_does_not_wait();
  two_entries_of_a_set_are_in_flight();
  disjoint_sets_do_not_wait_for_each_other();
  control_ops_and_errors_pass_a_full_set();
  deliberate_cycles_wait_even_for_the_blocked();
  an_id_replaces_the_name_once_all_use_it();
  a_changed_call_gets_a_new_id();
  a_cached_id_is_only_an_abbreviation();
  unnamed_calls_and_control_ops_have_no_id();
  an_evicted_id_is_asked_for_in_full();
  a_join_waits_for_calls_that_are_resent();
  an_id_evicted_while_announced_comes_back_as_another();
  an_entry_carries_what_all_have_sent();
  an_entry_without_data_is_not_in_flight();
  terms_are_complete_and_small_or_left_out();
  fused_calls_carry_all_terms_or_none();
  terms_are_those_of_the_contributors();
  a_disagreement_carries_nothing();
}
