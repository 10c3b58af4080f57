// The rules of the coordinator about joins, process sets, leaving and its clocks, one test each.
#include <map>

#include "lab.h"

namespace horovod {
namespace {

using namespace lab;

// ---- Join and barrier --------------------------------------------------------------------------

void joined_ranks_are_left_out() {
  Lab lab(3);
  lab.announce(1, join_call());
  lab.announce(0, call("x"));
  lab.silent();
  lab.announce(2, call("x"));
  CHECK((lab.good_entry().contributors == Ranks{0, 2}));
  lab.announce(0, call("b", OpKind::Barrier));
  lab.announce(2, call("b", OpKind::Barrier));
  CHECK((lab.good_entry().contributors == Ranks{0, 2}));
}

void a_join_completes_what_only_it_was_missing_in() {
  Lab lab(3);
  lab.announce(0, call("x"));
  lab.announce(2, call("x"));
  lab.announce(1, join_call());
  CHECK((lab.good_entry().contributors == Ranks{0, 2}));
}

void what_a_rank_announced_before_it_joined_counts() {
  Lab lab(2);
  lab.announce(0, call("x", OpKind::Allgather), false);
  lab.announce(0, join_call());
  lab.announce(1, call("x", OpKind::Allgather));
  CHECK((lab.good_entry().contributors == Ranks{0, 1}));
}

void join_returns_who_joined_last_and_starts_over() {
  Lab lab(3);
  for (int round = 0; round < 2; ++round) {
    lab.announce(2, join_call());
    lab.announce(0, join_call());
    lab.silent();
    lab.announce(1, join_call());
    const Entry joined = lab.good_entry();
    CHECK(joined.kind == OpKind::Join);
    CHECK((joined.contributors == Ranks{0, 1, 2}));
    CHECK_EQ(joined.value, 1);
    lab.announce(0, call("x"));
    lab.announce(1, call("x"));
    lab.silent();  // rank 2 is needed again
    lab.announce(2, call("x"));
    lab.done(lab.good_entry());
  }
}

void a_rank_back_from_join_starts_the_next_round() {
  Lab lab(2);
  lab.announce(1, join_call(), false);
  lab.announce(0, call("x"), false);
  lab.announce(0, join_call(), false);
  CHECK(lab.good_entry().kind == OpKind::Join);
  lab.announce(1, call("x"), false);  // x is ready without it, and waits for company
  lab.wait(1ms);
  CHECK((lab.good_entry().contributors == Ranks{0}));
  lab.announce(0, call("x"));
  CHECK((lab.good_entry().contributors == Ranks{0, 1}));
}

void most_calls_need_the_joined() {
  for (OpKind kind : {OpKind::Allgather, OpKind::Broadcast, OpKind::Alltoall, OpKind::Reducescatter,
                      OpKind::AddSet, OpKind::RemoveSet}) {
    Lab lab(3);
    Request request = kind == OpKind::AddSet      ? add_call({0, 1})
                      : kind == OpKind::RemoveSet ? remove_call(1)
                                                  : call("x", kind);
    lab.announce(1, join_call());
    lab.announce(0, request);
    lab.announce(2, request);
    const Entry error = lab.entry();
    CHECK((error.contributors == Ranks{0, 2}));
    CHECK(error.status.kind == ErrorKind::Mismatch);
    CHECK_EQ(error.status.rank, 1);
    CHECK(contains(error.status.text, ": rank 1 has joined, and "));
  }
}

void join_all_ops_leaves_them_out() {
  for (OpKind kind :
       {OpKind::Allgather, OpKind::Broadcast, OpKind::Alltoall, OpKind::Reducescatter}) {
    Lab lab(3, [](auto& o) { o.join_all_ops = true; });
    lab.announce(1, join_call());
    lab.announce(0, call("x", kind));
    lab.announce(2, call("x", kind));
    CHECK((lab.good_entry().contributors == Ranks{0, 2}));
  }
  Lab lab(3, [](auto& o) { o.join_all_ops = true; });
  Request broadcast = call("x", OpKind::Broadcast);
  broadcast.root = 1;
  lab.announce(1, join_call());
  lab.announce(0, broadcast);
  lab.announce(2, broadcast);
  CHECK_EQ(lab.error().text, "broadcast \"x\": root rank 1 has joined");
}

void joined_ranks_have_joined_in_all_their_sets() {
  Lab lab(3);
  const uint32_t set = lab.add_set({0, 1});
  lab.announce(1, join_call());
  lab.announce(0, in_set(call("x"), set));
  CHECK((lab.good_entry().contributors == Ranks{0}));
}

void a_call_from_inside_join_is_that_ranks_error() {
  Lab lab(2);
  lab.announce(1, join_call());
  lab.announce(1, call("x"));
  const Entry error = lab.entry();
  CHECK((error.contributors == Ranks{1}));
  CHECK(error.status.kind == ErrorKind::InvalidArgument);
  lab.announce(0, call("x"));
  CHECK((lab.good_entry().contributors == Ranks{0}));
}

void a_barrier_is_for_all_members() {
  Lab lab(3);
  const uint32_t set = lab.add_set({0, 2});
  lab.announce(2, in_set(call("b", OpKind::Barrier), set));
  lab.silent();
  lab.announce(0, in_set(call("b", OpKind::Barrier), set));
  const Entry barrier = lab.good_entry();
  CHECK(barrier.kind == OpKind::Barrier);
  CHECK((barrier.contributors == Ranks{0, 2}));
}

// ---- Process sets ------------------------------------------------------------------------------

void sets_get_numbers_that_only_grow() {
  Lab lab(3);
  CHECK_EQ(lab.add_set({0, 1}), 1u);
  CHECK_EQ(lab.add_set({1}), 2u);
  lab.all_announce(remove_call(1));
  CHECK_EQ(lab.good_entry().value, 1);
  CHECK_EQ(lab.add_set({0, 1}), 3u);
}

void an_added_set_comes_with_its_ranks() {
  Lab lab(3);
  lab.all_announce(add_call({0, 2}));
  const Entry added = lab.good_entry();
  CHECK(added.kind == OpKind::AddSet);
  CHECK((added.ranks == Ranks{0, 2}));
  CHECK((added.contributors == Ranks{0, 1, 2}));
}

void wrong_sets_are_every_callers_mistake() {
  Lab lab(3);
  lab.add_set({0, 1});
  int number = 0;
  for (const Ranks& ranks :
       {Ranks{0, 1, 2}, Ranks{0, 1}, Ranks{}, Ranks{1, 0}, Ranks{1, 1}, Ranks{3}, Ranks{-1, 0}}) {
    lab.all_announce(add_call(ranks, number++));
    const Entry error = lab.entry();
    CHECK(error.status.kind == ErrorKind::InvalidArgument);
    CHECK((error.contributors == Ranks{0, 1, 2}));
  }
  for (int32_t uid : {0, 2, -1}) {
    lab.all_announce(remove_call(uid, number++));
    CHECK(lab.error().kind == ErrorKind::InvalidArgument);
  }
}

void removing_a_set_fails_what_is_pending_in_it_first() {
  Lab lab(3);
  const uint32_t set = lab.add_set({0, 1});
  for (int32_t rank : {0, 1}) lab.announce(rank, in_set(call("ready"), set), false);
  lab.announce(1, in_set(call("waiting"), set), false);
  lab.announce(1, call("elsewhere"), false);
  lab.all_announce(remove_call(static_cast<int32_t>(set)));
  const auto all = lab.entries();
  CHECK_EQ(all.size(), 3u);
  CHECK(names(all[0]) == Names{"ready"});
  CHECK((all[0].contributors == Ranks{0, 1}));
  CHECK(names(all[1]) == Names{"waiting"});
  CHECK((all[1].contributors == Ranks{1}));
  for (int i : {0, 1})
    CHECK(
        contains(all[static_cast<size_t>(i)].status.text, "process set of ranks 0-1 was removed"));
  CHECK(all[2].kind == OpKind::RemoveSet && all[2].status.ok());
  lab.announce(0, in_set(call("late"), set));
  CHECK(contains(lab.error().text, "its process set was removed"));
}

void ids_of_a_removed_set_are_unknown() {
  Lab lab(2);
  const uint32_t set = lab.add_set({0});
  lab.announce(0, in_set(call("x"), set));
  const Entry entry = lab.good_entry();
  lab.done(entry);
  lab.all_announce(remove_call(static_cast<int32_t>(set)));
  lab.good_entry();
  lab.say(0, AnnounceCached{entry.items[0].id, true, {}});
  CHECK(std::holds_alternative<Resend>(lab.decide().at(0).decision));
}

void impossible_items_are_answered_and_never_fatal() {
  Lab lab(3);
  const uint32_t set = lab.add_set({0, 1});
  lab.announce(0, in_set(call("x"), 9));
  CHECK_EQ(lab.error().text, "allreduce \"x\": there is no process set 9");
  lab.announce(2, in_set(call("x"), set));
  CHECK_EQ(lab.error().text, "allreduce \"x\": rank 2 is not a member of process set 1");
  lab.announce(0, in_set(join_call(), set));
  CHECK(lab.error().kind == ErrorKind::InvalidArgument);
  lab.announce(0, call("x", OpKind::Shutdown));
  CHECK(lab.error().kind == ErrorKind::InvalidArgument);
  lab.say(0, Reject{OpKind::Allreduce, 9, "x", "bad"});
  lab.say(2, Reject{OpKind::Allreduce, set, "x", "bad"});
  lab.say(-1, Done{0});
  lab.say(3, Leave{});
  lab.silent();
  Request outside = in_set(call("x", OpKind::Broadcast), set);
  outside.root = 2;
  for (int32_t rank : {0, 1}) lab.announce(rank, outside);
  CHECK_EQ(lab.error().text, "broadcast \"x\": root rank 2 is not a member of the process set");
}

void a_name_announced_twice_is_the_ranks_error() {
  Lab lab(2);
  lab.announce(1, call("x"));
  lab.announce(1, call("x"));
  const Entry error = lab.entry();
  CHECK((error.contributors == Ranks{1}));
  CHECK(error.status.kind == ErrorKind::InvalidArgument);
  lab.announce(0, call("x"));
  CHECK((lab.entry().contributors == Ranks{0}));
  lab.all_announce(call("y"), false);
  lab.announce(1, call("y"), false);
  CHECK((lab.entry().contributors == Ranks{0, 1}));
  lab.announce(0, join_call());
  lab.announce(0, join_call());
  CHECK((lab.entry().contributors == Ranks{0}));
  lab.run(call("x"));
}

// ---- Leaving -----------------------------------------------------------------------------------

void leaving_is_acknowledged_last() {
  Lab lab(2);
  lab.all_announce(call("x"), false);
  lab.say(1, Leave{"it exited"});
  const auto all = lab.entries();
  CHECK_EQ(all.size(), 2u);
  CHECK(names(all[0]) == Names{"x"});  // it was agreed on
  CHECK(all[1].kind == OpKind::Shutdown && all[1].status.ok());
  CHECK((all[1].contributors == Ranks{1}));
  CHECK(!lab.coordinator().all_left());
  lab.say(0, Leave{});
  lab.silent();
  lab.done(all[0]);  // which rank 0 had to report
  CHECK((lab.good_entry().contributors == Ranks{0}));
  CHECK(lab.coordinator().all_left());
}

void leaving_waits_for_a_full_set() {
  Lab lab(2, [](auto& o) { o.fusion_threshold_bytes = 0; });
  for (int i = 0; i < 3; ++i) lab.all_announce(call(std::to_string(i)));
  const auto first = lab.entries();
  CHECK_EQ(first.size(), 2u);
  lab.say(1, Leave{});
  lab.silent();
  lab.done(first[0]);
  CHECK_EQ(lab.entries().size(), 2u);
}

void who_waits_for_one_that_left_is_told() {
  Lab lab(3);
  const uint32_t set = lab.add_set({0, 2});
  lab.announce(0, call("x"));
  lab.announce(1, call("x"));
  lab.announce(1, call("own"));
  lab.announce(0, in_set(call("y"), set), false);
  lab.say(1, Leave{"KeyError: 'x'"});
  const auto all = lab.entries();
  CHECK_EQ(all.size(), 2u);
  CHECK((all[0].contributors == Ranks{0}));
  CHECK(all[0].status.kind == ErrorKind::Shutdown);
  CHECK_EQ(all[0].status.rank, 1);
  CHECK_EQ(all[0].status.text, "allreduce \"x\": rank 1 (host0, pid 101) has left: KeyError: 'x'");
  CHECK(all[1].kind == OpKind::Shutdown);
  lab.announce(2, call("later"));
  CHECK_EQ(lab.error().rank, 1);
  lab.announce(2, join_call());
  CHECK(lab.error().kind == ErrorKind::Shutdown);
  lab.announce(2, in_set(call("y"), set));
  CHECK((lab.good_entry().contributors == Ranks{0, 2}));  // a set without it goes on
  lab.announce(1, call("ghost"));
  lab.silent();
}

// ---- Clocks ------------------------------------------------------------------------------------

void a_stall_is_reported_once_with_whom_it_waits_for() {
  Lab lab(4, [](auto& o) { o.deadlock = {}; });
  lab.run(call("before"));
  lab.wait(3s);
  for (int i = 0; i < 8; ++i) {
    lab.announce(0, call("x" + std::to_string(i)));
    lab.announce(2, call("x" + std::to_string(i)));
    lab.announce(3, call("x" + std::to_string(i)));
    lab.wait(1s);
  }
  lab.silent();
  CHECK(lab.deadline() == 52s);
  lab.wait(52s);
  lab.silent();
  CHECK_EQ(lab.log.size(), 1u);
  CHECK_EQ(lab.log[0].level, 30);
  CHECK_EQ(
      lab.log[0].text,
      "stall: ranks 0, 2-3 have waited for 60 s. Missing: rank 1 (host0, pid 101), which last "
      "announced allreduce \"before\" 63 s ago. Waiting calls: allreduce \"x0\", allreduce \"x1\", "
      "allreduce \"x2\", allreduce \"x3\", allreduce \"x4\", allreduce \"x5\" and 2 more");
  lab.wait(1h);
  lab.silent();
  CHECK_EQ(lab.log.size(), 1u);
  CHECK(!lab.deadline());
  for (int i = 0; i < 8; ++i) lab.announce(1, call("x" + std::to_string(i)));
  lab.good_entry();
  CHECK_EQ(lab.log.size(), 2u);
  CHECK_EQ(lab.log[1].level, 20);
  CHECK_EQ(lab.log[1].text, "stall resolved after 3660 s: allreduce \"x0\" and 7 more");
}

void different_missing_ranks_are_different_lines() {
  Lab lab(3, [](auto& o) { o.deadlock = {}; });
  lab.announce(0, call("x"));
  lab.announce(1, call("y"));
  lab.announce(2, call("y"));
  lab.wait(60s);
  lab.silent();
  CHECK_EQ(lab.log.size(), 2u);
  CHECK(contains(
      lab.log[0].text,
      "Missing: rank 1 (host0, pid 101), which last announced allreduce \"y\" 60 s ago; rank 2"));
  CHECK(contains(lab.log[1].text, "Missing: rank 0 "));
}

void a_stall_can_end_the_job_on_request() {
  Lab lab(3, [](auto& o) { o.stall_shutdown = 90s; });
  lab.announce(0, call("x"));
  lab.announce(1, call("x"));
  lab.wait(60s);
  lab.silent();
  CHECK(lab.deadline() == 30s);
  lab.wait(30s);
  const auto out = lab.decide();
  CHECK_EQ(out.size(), 1u);
  CHECK((out[0].to == Ranks{0, 1, 2}));
  const Status& status = std::get<Abort>(out[0].decision).status;
  CHECK(status.kind == ErrorKind::Timeout);
  CHECK_EQ(status.rank, 2);
  CHECK(contains(status.text, "allreduce \"x\" has waited for 90 s"));
  CHECK(contains(status.text, "rank 2 (host1, pid 102), which hasn't announced anything yet"));
  CHECK_EQ(lab.log.back().level, 40);
  lab.announce(2, call("x"));  // too late: said once, and then nothing
  lab.silent();
  CHECK(!lab.deadline());
}

void a_shutdown_time_below_the_warning_time_is_ignored() {
  Lab lab(2, [](auto& o) { o.stall_shutdown = 5s; });
  lab.announce(0, call("x"));
  lab.silent();
  CHECK_EQ(lab.log.size(), 1u);
  CHECK(contains(lab.log[0].text,
                 "stall shutdown time (5 s) is shorter than the stall warning time (60 s)"));
  lab.wait(1h);
  lab.silent();
}

void waiting_in_join_is_not_a_reason_to_end() {
  Lab lab(2, [](auto& o) { o.stall_shutdown = 90s; });
  lab.announce(0, join_call());
  lab.wait(1h);
  lab.silent();
  CHECK_EQ(lab.log.size(), 1u);
}

void a_deadlock_ends_the_job_and_names_every_ranks_calls() {
  Lab lab(3);
  lab.announce(0, call("x"));
  lab.announce(1, call("y"));
  CHECK(lab.deadline() == 60s);  // the stall warning
  lab.wait(10s);
  lab.announce(2, join_call());
  lab.wait(50s);
  lab.silent();
  CHECK(lab.deadline() == 10s);
  lab.wait(10s);
  const auto out = lab.decide();
  CHECK_EQ(out.size(), 1u);
  const Status& status = std::get<Abort>(out[0].decision).status;
  CHECK(status.kind == ErrorKind::Timeout);
  CHECK(contains(status.text, "rank 0 (host0, pid 100) waits for allreduce \"x\""));
  CHECK(contains(status.text, "rank 1 (host0, pid 101) waits for allreduce \"y\""));
  CHECK(contains(status.text, "rank 2 (host1, pid 102) waits for join \"join\""));
}

// ---- Where ranks are ---------------------------------------------------------------------------

// Reports wait half a second for ranks to say where they are.
struct AskingLab : Lab {
  explicit AskingLab(int32_t size, const std::function<void(CoordinatorOptions&)>& change = {})
      : Lab(size, [&](auto& o) {
          o.answers = 500ms;
          if (change) change(o);
        }) {}

  // What is asked now, by rank; nothing else is decided.
  std::map<int32_t, Locate> questions() {
    std::map<int32_t, Locate> all;
    for (Outgoing& outgoing : decide()) {
      CHECK_EQ(outgoing.to.size(), 1u);
      all[outgoing.to[0]] = std::get<Locate>(std::move(outgoing.decision));
    }
    return all;
  }
  Status ending() {
    const auto out = decide();
    CHECK_EQ(out.size(), 1u);
    return std::get<Abort>(out[0].decision).status;
  }
};

Request unnamed_call(int number) {
  Request r = call("allreduce.noname." + std::to_string(number));
  r.unnamed = true;
  return r;
}

void a_report_waits_for_answers_but_not_for_long() {
  for (const bool all_answer : {true, false}) {
    AskingLab lab(3, [](auto& o) { o.deadlock = {}; });
    lab.run(call("last"));
    lab.announce(0, unnamed_call(6));
    lab.wait(60s);
    const auto asked = lab.questions();
    CHECK_EQ(asked.size(), 3u);
    for (const auto& [rank, question] : asked) CHECK_EQ(question.name, "allreduce.noname.6");
    CHECK(lab.log.empty());
    CHECK(lab.deadline() == 500ms);
    lab.say(0, Located{asked.at(0).id, "allreduce.noname.6", "train.py:12"});
    lab.say(1, Located{asked.at(1).id, "last", "train.py:31"});
    lab.say(1, Located{asked.at(1).id, "last", "again.py:1"});   // answers once
    lab.say(1, Located{asked.at(2).id, "last", "others.py:1"});  // and for itself
    if (all_answer) lab.say(2, Located{asked.at(2).id, "last", ""});
    lab.silent();
    CHECK_EQ(lab.log.empty(), !all_answer);
    if (!all_answer) lab.wait(500ms);
    lab.silent();
    CHECK_EQ(lab.log.size(), 1u);
    const std::string& text = lab.log[0].text;
    CHECK(contains(text,
                   "rank 1 (host0, pid 101), which last announced allreduce \"last\" at "
                   "train.py:31 60 s ago; rank 2"));
    CHECK(contains(text, "Waiting calls: allreduce \"noname.6\" (rank 0 at train.py:12)"));
    CHECK(contains(text, "Calls without a name match by their number"));
    CHECK_EQ(text.find("doesn't answer now") == std::string::npos, all_answer);
  }
}

void what_is_resolved_meanwhile_is_still_told() {
  AskingLab lab(2);
  lab.announce(0, call("x"));
  lab.wait(60s);
  const auto asked = lab.questions();
  lab.announce(1, call("x"));
  lab.good_entry();
  CHECK_EQ(lab.log.size(), 2u);
  CHECK(lab.log[0].text.starts_with("stall: rank 0 has waited for 60 s"));
  CHECK(lab.log[1].text.starts_with("stall resolved after 60 s"));
  lab.say(1, Located{asked.at(1).id, "x", "late.py:1"});
  lab.silent();
}

void an_answer_is_about_the_call_that_is_named() {
  AskingLab lab(2);
  lab.run(call("a"));
  lab.announce(0, call("x"));
  lab.wait(60s);
  const auto asked = lab.questions();
  lab.say(0, Located{asked.at(0).id, "x", ""});
  lab.say(1, Located{asked.at(1).id, "other", "other.py:1"});
  lab.silent();
  CHECK_EQ(lab.log.size(), 1u);
  CHECK(lab.log[0].text.find(".py") == std::string::npos);
}

void an_end_says_where_ranks_are() {
  AskingLab lab(2, [](auto& o) { o.stall_shutdown = 90s; });
  lab.announce(0, call("x"));
  lab.wait(60s);
  lab.questions();
  lab.wait(30s);
  const auto asked = lab.questions();
  CHECK_EQ(asked.size(), 2u);
  lab.say(0, Located{asked.at(0).id, "x", "train.py:12"});
  lab.silent();
  CHECK(lab.deadline() == 500ms);
  lab.wait(500ms);
  const Status status = lab.ending();
  CHECK(contains(status.text, "allreduce \"x\" (rank 0 at train.py:12) has waited for 90 s"));
  CHECK(contains(status.text, "hasn't announced anything yet and doesn't answer now"));
  CHECK_EQ(status.rank, 1);
}

void a_deadlock_says_where_ranks_are() {
  AskingLab lab(2, [](auto& o) { o.stall_warning = {}; });
  lab.announce(0, call("x"));
  lab.announce(1, call("y"));
  lab.wait(60s);
  const auto asked = lab.questions();
  CHECK_EQ(asked.at(0).name, "x");
  CHECK_EQ(asked.at(1).name, "y");
  lab.say(0, Located{asked.at(0).id, "x", "train.py:12"});
  lab.wait(100ms);
  lab.say(1, Located{asked.at(1).id, "y", "eval.py:9"});  // no sign that anything goes on
  const Status status = lab.ending();
  CHECK(contains(status.text, "waits for allreduce \"x\" at train.py:12; rank 1"));
  CHECK(contains(status.text, "waits for allreduce \"y\" at eval.py:9"));
}

void an_end_that_is_not_due_any_more_does_not_come() {
  AskingLab lab(2, [](auto& o) { o.stall_warning = {}; });
  lab.announce(0, call("x"));
  lab.announce(1, call("y"));
  lab.wait(60s);
  CHECK_EQ(lab.questions().size(), 2u);
  lab.announce(1, call("x"), false);
  CHECK(lab.good_entry().status.ok());
  lab.wait(1h);
  lab.silent();
}

// Ranks 0-1 have a set of their own, and a second passes before crossed calls are one mistake.
struct CrossingLab : Lab {
  CrossingLab() : Lab(3, [](auto& o) { o.crossed = 1s; }) {
    all_announce(add_call({0, 1}));
    entries();
  }
};

void expect_crossing(Lab& lab, const std::string& text) {
  lab.silent();
  CHECK(lab.deadline() == 1s);
  lab.wait(1s);
  const auto entries = lab.entries();
  CHECK_EQ(entries.size(), 2u);
  for (const Entry& entry : entries) {
    CHECK(entry.status.kind == ErrorKind::Mismatch);
    CHECK(contains(entry.status.text, text));
  }
  lab.all_announce(call("after"));
  CHECK(lab.entry().status.ok());
}

void one_name_called_in_two_sets_is_a_disagreement() {
  CrossingLab lab;
  lab.announce(0, in_set(call("allreduce.x"), 1));
  lab.announce(1, call("allreduce.x"));
  lab.announce(2, call("allreduce.x"));
  expect_crossing(lab,
                  "ranks made different calls: rank 0 called allreduce \"x\" of the set of "
                  "ranks 0-1, ranks 1-2 called allreduce \"x\" of all ranks");
}

void one_name_of_two_operations_is_a_disagreement() {
  CrossingLab lab;
  lab.announce(0, call("allreduce.k"));
  lab.announce(1, call("broadcast.k", OpKind::Broadcast));
  lab.announce(2, call("allreduce.k"));
  expect_crossing(
      lab,
      "ranks 0, 2 called allreduce \"k\" of all ranks, rank 1 called broadcast \"k\" of "
      "all ranks");
}

void other_names_are_no_crossing() {
  CrossingLab lab;
  lab.announce(0, call("x"));
  lab.announce(1, call("y"));
  lab.announce(2, call("x"));
  CHECK(lab.deadline() == 1s);
  lab.wait(1s);
  lab.silent();
  CHECK(lab.deadline() == 59s);
}

void it_is_no_crossing_while_someone_works() {
  CrossingLab lab;
  lab.announce(0, in_set(call("x"), 1));
  lab.announce(1, call("x"));
  lab.announce(2, call("x"), false);
  lab.wait(30s);
  lab.silent();
}

void it_is_no_deadlock_while_someone_works() {
  Lab lab(3);
  lab.announce(0, call("x"));
  lab.announce(1, call("y"));
  lab.announce(2, call("z"), false);  // not blocked
  lab.wait(1h);
  lab.silent();
  lab.say(2, Blocked{0, "z"});
  CHECK(lab.deadline() == 60s);
  lab.wait(59s);
  lab.say(2, Blocked{0, "z"});  // anything heard starts the clock again
  CHECK(lab.deadline() == 60s);
  lab.say(2, Leave{});
  lab.entries();
  lab.wait(1h);
  lab.silent();  // everyone else was told, nobody waits
}

void it_is_no_deadlock_while_an_entry_runs() {
  Lab lab(2);
  lab.all_announce(call("x"));
  const Entry running = lab.good_entry();
  lab.announce(0, call("y"));
  lab.announce(1, call("z"));
  lab.wait(1h);
  lab.silent();
  lab.done(running);
  CHECK(lab.deadline() == 60s);
}

void a_held_call_is_part_of_a_deadlock() {
  Lab lab(2);
  lab.say(1, Reject{OpKind::Allreduce, 0, "x", "bad"});
  lab.announce(1, call("x"), false);
  lab.say(1, Blocked{0, "x"});
  lab.announce(0, call("y"));
  lab.wait(60s);
  const auto out = lab.decide();
  CHECK(contains(std::get<Abort>(out.at(0).decision).status.text,
                 "rank 1 (host0, pid 101) waits for allreduce \"x\""));
}

void zero_means_never() {
  Lab lab(2, [](auto& o) {
    o.stall_warning = {};
    o.deadlock = {};
  });
  lab.announce(0, call("x"));
  lab.announce(1, call("y"));
  CHECK(!lab.deadline());
  lab.wait(1000h);
  lab.silent();
  CHECK(lab.log.empty());
}

void counters_count() {
  Lab lab(2);
  lab.all_announce(call("a"), false);
  lab.all_announce(call("b"), true);
  lab.good_entry();
  lab.run(call("c"));
  lab.announce(0, call("x"));
  lab.announce(1, call("x", OpKind::Allreduce, {5}));
  lab.error();
  const Coordinator::Counters& c = lab.coordinator().counters();
  CHECK_EQ(c.entries, 3u);
  CHECK_EQ(c.tensors, 3u);
  CHECK_EQ(c.fused_tensors, 2u);
  CHECK_EQ(c.errors, 1u);
}

}  // namespace
}  // namespace horovod

int main() {
  using namespace horovod;
  joined_ranks_are_left_out();
  a_join_completes_what_only_it_was_missing_in();
  what_a_rank_announced_before_it_joined_counts();
  join_returns_who_joined_last_and_starts_over();
  a_rank_back_from_join_starts_the_next_round();
  most_calls_need_the_joined();
  join_all_ops_leaves_them_out();
  joined_ranks_have_joined_in_all_their_sets();
  a_call_from_inside_join_is_that_ranks_error();
  a_barrier_is_for_all_members();
  sets_get_numbers_that_only_grow();
  an_added_set_comes_with_its_ranks();
  wrong_sets_are_every_callers_mistake();
  removing_a_set_fails_what_is_pending_in_it_first();
  ids_of_a_removed_set_are_unknown();
  impossible_items_are_answered_and_never_fatal();
  a_name_announced_twice_is_the_ranks_error();
  leaving_is_acknowledged_last();
  leaving_waits_for_a_full_set();
  who_waits_for_one_that_left_is_told();
  a_stall_is_reported_once_with_whom_it_waits_for();
  different_missing_ranks_are_different_lines();
  a_stall_can_end_the_job_on_request();
  a_shutdown_time_below_the_warning_time_is_ignored();
  waiting_in_join_is_not_a_reason_to_end();
  a_deadlock_ends_the_job_and_names_every_ranks_calls();
  a_report_waits_for_answers_but_not_for_long();
  what_is_resolved_meanwhile_is_still_told();
  an_answer_is_about_the_call_that_is_named();
  an_end_says_where_ranks_are();
  a_deadlock_says_where_ranks_are();
  an_end_that_is_not_due_any_more_does_not_come();
  one_name_called_in_two_sets_is_a_disagreement();
  one_name_of_two_operations_is_a_disagreement();
  other_names_are_no_crossing();
  it_is_no_crossing_while_someone_works();
  it_is_no_deadlock_while_someone_works();
  it_is_no_deadlock_while_an_entry_runs();
  a_held_call_is_part_of_a_deadlock();
  zero_means_never();
  counters_count();
}
