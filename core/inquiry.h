// L4: what a report asks ranks before it is made: where in their program they made a call. Must not
// know what is reported.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "coordinator.h"
#include "types.h"
#include "wire.h"

namespace horovod {

class Inquiry {
 public:
  // Where the rank made this call; if it hasn't, its last one. One question for each rank.
  void ask(int32_t rank, uint32_t set, std::string name) {
    if (find(rank) == nullptr) questions_.push_back({rank, {0, set, std::move(name)}, {}, false});
  }

  // Sends the questions; without a limit there is no time for answers, and nobody is asked.
  void send(uint64_t& next_id, TimePoint now, Duration limit, std::vector<Outgoing>& out) {
    if (limit <= Duration{}) questions_.clear();
    for (Question& question : questions_) {
      question.locate.id = next_id++;
      out.push_back({{question.rank}, question.locate});
    }
    open_ = questions_.size();
    until_ = now + limit;
  }

  // Ignores what answers none of its questions.
  void hear(int32_t rank, const Located& answer) {
    Question* question = find(rank);
    if (question == nullptr || question->locate.id != answer.id || question->answered) return;
    question->answered = true;
    question->answer = answer;
    --open_;
  }

  TimePoint until() const { return until_; }
  bool over(TimePoint now) const { return open_ == 0 || now >= until_; }

  // " at train.py:12" if that is where the rank made the call of this name.
  std::string where(int32_t rank, std::string_view name) const {
    const Question* question = find(rank);
    const bool known = question != nullptr && question->answer.name == name;
    return known && !question->answer.site.empty() ? " at " + question->answer.site : "";
  }
  bool silent(int32_t rank) const {
    const Question* question = find(rank);
    return question != nullptr && !question->answered;
  }

 private:
  struct Question {
    int32_t rank;
    Locate locate;
    Located answer;
    bool answered;
  };

  const Question* find(int32_t rank) const {
    const auto it = std::find_if(questions_.begin(), questions_.end(),
                                 [&](const Question& question) { return question.rank == rank; });
    return it == questions_.end() ? nullptr : &*it;
  }
  Question* find(int32_t rank) { return const_cast<Question*>(std::as_const(*this).find(rank)); }

  std::vector<Question> questions_;
  size_t open_ = 0;
  TimePoint until_;
};

}  // namespace horovod
