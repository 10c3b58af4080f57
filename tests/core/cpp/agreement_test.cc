// The rules of the coordinator about readiness, agreement and rejected calls, one test each.
#include <cmath>

#include "lab.h"

namespace horovod {
namespace {

using namespace lab;

// ---- Readiness ---------------------------------------------------------------------------------

void a_call_runs_once_all_members_announced_it() {
  Lab lab(3, [](auto& o) { o.plan_hash = 77; });
  lab.announce(2, call("x"));
  lab.announce(0, call("x"));
  lab.silent();
  lab.announce(1, call("x"));
  const Entry first = lab.good_entry();
  CHECK((first.contributors == Ranks{0, 1, 2}));
  CHECK(names(first) == Names{"x"});
  CHECK_EQ(first.plan_hash, 77u);
  lab.silent();
  CHECK_EQ(lab.run(call("y")).seq, first.seq + 1);
}

void names_are_ready_in_any_order() {
  Lab lab(2, [](auto& o) { o.fusion_threshold_bytes = 0; });
  lab.announce(0, call("x"));
  lab.announce(0, call("y"));
  lab.announce(1, call("y"));
  lab.announce(1, call("x"));
  const auto all = lab.entries();
  CHECK_EQ(all.size(), 2u);
  CHECK(names(all[0]) == Names{"y"});
  CHECK(names(all[1]) == Names{"x"});
}

void a_world_of_one_needs_nobody() {
  Lab lab(1);
  CHECK((lab.run(call("x")).contributors == Ranks{0}));
  lab.announce(0, join_call());
  CHECK_EQ(lab.good_entry().value, 0);
}

void the_same_input_gives_the_same_output() {
  Lab a(4), b(4);
  for (int i = 0; i < 50; ++i) {
    for (int32_t rank : {3, 1, 0, 2}) {
      for (Lab* lab : {&a, &b})
        lab->announce(rank, call("x" + std::to_string((i * 7 + rank) % 9)), i % 3 == 0);
    }
    const auto left = a.decide(), right = b.decide();
    CHECK_EQ(left.size(), right.size());
    for (size_t k = 0; k < left.size(); ++k) {
      CHECK(left[k].decision == right[k].decision);
      CHECK(left[k].to == right[k].to);
    }
  }
}

// ---- Agreement ---------------------------------------------------------------------------------

struct Disagreement {
  const char* what;
  Request base;
  std::function<void(Request&)> change;
  const char* text;
};

std::vector<Disagreement> disagreements() {
  const auto grouped = [] {
    Request r = call("x");
    r.tensors.push_back({DType::Int32, {2, 2}});
    return r;
  };
  return {
      {"dtype", call("x"), [](Request& r) { r.tensors[0].dtype = DType::Float16; },
       "allreduce \"x\": ranks 0, 2 sent float32, rank 1 float16"},
      {"operation", call("x"), [](Request& r) { r.kind = OpKind::Broadcast; },
       "allreduce \"x\": operation: ranks 0, 2 sent allreduce, rank 1 broadcast"},
      {"count", grouped(), [](Request& r) { r.tensors.pop_back(); },
       "allreduce \"x\": number of tensors: ranks 0, 2 sent 2, rank 1 1"},
      {"shape", call("x", OpKind::Allreduce, {17, 3}),
       [](Request& r) { r.tensors[0].shape = {17, 4}; },
       "allreduce \"x\": shape: ranks 0, 2 sent [17, 3], rank 1 [17, 4]"},
      {"shape in a group", grouped(), [](Request& r) { r.tensors[1].shape = {4}; },
       "allreduce \"x\": shape: tensor 1 of the group: ranks 0, 2 sent [2, 2], rank 1 [4]"},
      {"prescale", call("x"), [](Request& r) { r.prescale = 0.5; },
       "allreduce \"x\": prescale factor: ranks 0, 2 sent 1, rank 1 0.5"},
      {"postscale", call("x", OpKind::Reducescatter), [](Request& r) { r.postscale = 0.25; },
       "reducescatter \"x\": postscale factor: ranks 0, 2 sent 1, rank 1 0.25"},
      {"reduce op", call("x"), [](Request& r) { r.op = ReduceOp::Max; },
       "allreduce \"x\": reduce op: ranks 0, 2 sent Sum, rank 1 Max"},
      {"rows", call("x", OpKind::Allgather, {3}), [](Request& r) { r.tensors[0].shape = {5}; },
       "allgather \"x\": dimensions after the first: ranks 0, 2 sent [3], rank 1 [5]"},
      {"root", call("x", OpKind::Broadcast), [](Request& r) { r.root = 2; },
       "broadcast \"x\": root rank: ranks 0, 2 sent 0, rank 1 2"},
      {"0-d of a gather", call("x", OpKind::Alltoall, {}), [](Request& r) { r.scalar = true; },
       "alltoall \"x\": rank 1 sent a 0-d tensor, and alltoall needs a first dimension"},
      {"members", add_call({0, 1}), [](Request& r) { r.ranks = {1, 2}; },
       "add_process_set \"add.0\": ranks: ranks 0, 2 sent ranks 0-1, rank 1 ranks 1-2"},
      {"removed set", remove_call(1), [](Request& r) { r.root = 2; },
       "remove_process_set \"remove.0\": process set: ranks 0, 2 sent 1, rank 1 2"},
  };
}

void every_disagreement_is_a_named_error_for_all() {
  for (const Disagreement& d : disagreements()) {
    Lab lab(3);
    Request other = d.base;
    d.change(other);
    lab.announce(0, d.base);
    lab.announce(1, other);
    lab.silent();  // once every contributor has announced
    lab.announce(2, d.base);
    const Entry error = lab.entry();
    CHECK_EQ(error.status.text, d.text);
    CHECK(error.status.kind == ErrorKind::Mismatch);
    CHECK_EQ(error.status.rank, 1);
    CHECK((error.contributors == Ranks{0, 1, 2}));
    CHECK(names(error) == Names{d.base.name});
    lab.run(call("x"));  // the name is free, and nothing else is disturbed
  }
}

void the_first_difference_in_the_documented_order_is_reported() {
  const std::vector<std::pair<std::function<void(Request&)>, const char*>> steps = {
      {[](Request& r) { r.tensors[0].dtype = DType::Int8; }, "int8"},
      {[](Request& r) { r.kind = OpKind::Reducescatter; }, "operation: "},
      {[](Request& r) { r.tensors[0].shape = {9}; }, "shape: "},
      {[](Request& r) { r.prescale = 3; }, "prescale factor: "},
      {[](Request& r) { r.postscale = 3; }, "postscale factor: "},
      {[](Request& r) { r.op = ReduceOp::Min; }, "reduce op: "},
  };
  for (size_t from = 0; from < steps.size(); ++from) {
    Request other = call("x");
    for (size_t i = from; i < steps.size(); ++i) steps[i].first(other);
    Lab lab(2);
    lab.announce(0, call("x"));
    lab.announce(1, other);
    CHECK(contains(lab.error().text, steps[from].second));
  }
}

void a_0d_reducescatter_is_refused() {
  Lab lab(2);
  lab.all_announce(call("x", OpKind::Reducescatter, {}));
  const Status error = lab.error();
  CHECK_EQ(error.text,
           "reducescatter \"x\": ranks 0-1 sent a 0-d tensor, and reducescatter needs a first "
           "dimension");
  CHECK_EQ(error.rank, -1);
  lab.run(call("x", OpKind::Broadcast, {}));
  lab.run(call("x", OpKind::Allreduce, {}));
}

void more_than_two_values_name_all_ranks() {
  Lab lab(6);
  const DType dtypes[] = {DType::Float32, DType::Float32, DType::Int8,
                          DType::Float32, DType::Int8,    DType::Bool};
  for (int32_t rank = 0; rank < 6; ++rank) {
    Request r = call("x");
    r.tensors[0].dtype = dtypes[rank];
    lab.announce(rank, r);
  }
  const Status error = lab.error();
  CHECK_EQ(error.text, "allreduce \"x\": ranks 0-1, 3 sent float32, ranks 2, 4 int8, rank 5 bool");
  CHECK_EQ(error.rank, 5);
}

void a_kind_that_the_name_starts_with_is_said_once() {
  Lab lab(2);
  lab.announce(0, call("allreduce.conv1.weight"));
  lab.announce(1, call("allreduce.conv1.weight", OpKind::Allreduce, {5}));
  CHECK(contains(lab.error().text, "allreduce \"conv1.weight\": shape: "));
  lab.announce(0, call("allreduce."));
  lab.announce(1, call("allreduce.", OpKind::Allreduce, {5}));
  CHECK(contains(lab.error().text, "allreduce \"allreduce.\": shape: "));
}

void between_two_ranks_nobody_is_blamed() {
  Lab lab(2);
  lab.announce(0, call("x"));
  lab.announce(1, call("x", OpKind::Allreduce, {5}));
  CHECK_EQ(lab.error().rank, -1);
}

void texts_stay_short() {
  Lab lab(200);
  const std::string name(60000, 'n');
  for (int32_t rank = 0; rank < 200; ++rank)
    lab.announce(rank, call(name, OpKind::Allreduce, {rank + 1}));
  CHECK(lab.error().text.size() < 2000);
}

void scales_are_equal_if_their_bits_are() {
  Lab lab(2);
  Request nan = call("x");
  nan.prescale = std::nan("");
  lab.run(nan);
  Request negative_zero = call("x");
  negative_zero.prescale = -0.0;
  Request zero = call("x");
  zero.prescale = 0.0;
  lab.announce(0, zero);
  lab.announce(1, negative_zero);
  CHECK(contains(lab.error().text, "prescale factor: rank 0 sent 0, rank 1 -0"));
}

// ---- Rejections --------------------------------------------------------------------------------

void a_rejection_fails_the_others() {
  Lab lab(3);
  lab.announce(0, call("x"));
  lab.say(1, Reject{OpKind::Allreduce, 0, "x", "ValueError: bad splits"});
  lab.silent();
  lab.announce(2, call("x"));
  const Entry error = lab.entry();
  CHECK((error.contributors == Ranks{0, 2}));
  CHECK(error.status.kind == ErrorKind::Mismatch);
  CHECK_EQ(error.status.rank, 1);
  CHECK_EQ(error.status.text,
           "allreduce \"x\": rank 1's call failed there: ValueError: bad splits");
  lab.run(call("x"));
}

void what_failed_everywhere_concerns_nobody() {
  Lab lab(2);
  for (int32_t rank : {0, 1}) lab.say(rank, Reject{OpKind::Allgather, 0, "x", "bad"});
  lab.silent();
  lab.run(call("x"));
}

void a_call_after_a_rejection_belongs_to_the_next_round() {
  Lab lab(2);
  lab.say(1, Reject{OpKind::Allreduce, 0, "x", "bad"});
  lab.announce(1, call("x"));
  lab.announce(0, call("x"));
  CHECK((lab.entry().contributors == Ranks{0}));  // the round that failed
  lab.announce(0, call("x"));
  CHECK((lab.good_entry().contributors == Ranks{0, 1}));
}

void several_rejections_are_several_rounds() {
  Lab lab(2);
  for (int i = 0; i < 3; ++i) lab.say(1, Reject{OpKind::Allreduce, 0, "x", "bad"});
  lab.announce(1, call("x"));
  for (int i = 0; i < 3; ++i) {
    lab.announce(0, call("x"));
    CHECK((lab.entry().contributors == Ranks{0}));
  }
  lab.announce(0, call("x"));
  lab.good_entry();
}

}  // namespace
}  // namespace horovod

int main() {
  using namespace horovod;
  a_call_runs_once_all_members_announced_it();
  names_are_ready_in_any_order();
  a_world_of_one_needs_nobody();
  the_same_input_gives_the_same_output();
  every_disagreement_is_a_named_error_for_all();
  the_first_difference_in_the_documented_order_is_reported();
  a_0d_reducescatter_is_refused();
  more_than_two_values_name_all_ranks();
  a_kind_that_the_name_starts_with_is_said_once();
  between_two_ranks_nobody_is_blamed();
  texts_stay_short();
  scales_are_equal_if_their_bits_are();
  a_rejection_fails_the_others();
  what_failed_everywhere_concerns_nobody();
  a_call_after_a_rejection_belongs_to_the_next_round();
  several_rejections_are_several_rounds();
}
