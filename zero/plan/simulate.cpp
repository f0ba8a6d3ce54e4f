#include "zero/plan/simulate.h"

#include <algorithm>
#include <utility>

namespace ballast {
namespace {

constexpr int steps = 3;

std::size_t index(Lane lane) { return static_cast<std::size_t>(lane); }
std::size_t index(Phase phase) { return static_cast<std::size_t>(phase); }

// The time in which an operation last ran without a break, and the operation that it waited for before that.
struct Span {
  double begin = 0;
  double end = 0;
  double busy = 0;  // more than from begin to end if there were breaks
  std::size_t held_up_by = none;
};

bool needs_cores(const Op& op) { return !is_of_drives(op.lane) && op.kind != OpKind::agree; }
// A GPU copies and updates while it multiplies, but products of an update and those of the model take turns.
bool multiplies(const Op& op) { return op.kind == OpKind::use || op.kind == OpKind::orthogonalize; }
bool needs_links(const Op& op) {
  return op.kind == OpKind::gather || op.kind == OpKind::reduce || op.kind == OpKind::collect ||
         op.kind == OpKind::distribute;
}

class Walk {
 public:
  explicit Walk(const SimulationInput& input) : in_(input), size_(input.program.ops.size()) {
    lane_last_.fill(none);
    for (int step = 0; step < steps; ++step) {
      begin_of_step_ = spans_.size();
      trainer_at_beginning_ = trainer_free_;
      exposed_ = {};
      for (const Op& op : input.program.ops)
        run(op);
      if (input.waits_for_updates) wait_for_all();
    }
  }

  Simulation result() const {
    Simulation result{.seconds = trainer_free_ - trainer_at_beginning_, .exposed = exposed_};
    for (std::size_t i = 0; i < size_; ++i) {
      const Op& op = in_.program.ops[i];
      const Span& span = spans_[begin_of_step_ + i];
      result.busy[index(op.lane)] += span.busy;
      result.bytes[index(op.lane)] += bytes_moved(op, in_.placement);
    }
    follow_back(result);
    return result;
  }

  std::vector<SimulatedOp> timeline() const {
    std::vector<SimulatedOp> timeline;
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      const Span& span = spans_[i];
      if (span.begin == span.end || span.end <= trainer_at_beginning_ || span.begin >= trainer_free_) continue;
      timeline.push_back({.op = i % size_,
                          .of_earlier_step = i < begin_of_step_,
                          .begin = span.begin - trainer_at_beginning_,
                          .end = span.end - trainer_at_beginning_});
    }
    return timeline;
  }

 private:
  void run(const Op& op) {
    const std::size_t self = spans_.size();
    Span span;
    const auto after = [&](std::size_t other) {
      if (other == none || spans_[other].end <= span.begin) return;
      span.begin = spans_[other].end;
      span.held_up_by = other;
    };
    after(came_by_);
    after(lane_last_[index(op.lane)]);
    for (const Wait& wait : op.after) {
      if (!wait.of_last_step) after(begin_of_step_ + wait.op);
      if (wait.of_last_step && begin_of_step_ > 0) after(begin_of_step_ - size_ + wait.op);
    }
    span.busy = seconds_of(op, in_);
    if (in_.machine.shares_cores && needs_cores(op)) {
      span.end = span.begin;
      take_turn(cores_, span.busy, span, self);
    } else if (multiplies(op)) {
      span.end = span.begin;
      take_turn(products_, span.busy, span, self);
    } else {
      span.end = span.begin + span.busy;
      if (needs_links(op)) use_links(op, span, self);
    }
    if (op.lane == Lane::fetch) fetched_ += span.busy;
    if (op.lane == Lane::disk) span.end += std::exchange(fetched_, 0.0);
    spans_.push_back(span);
    lane_last_[index(op.lane)] = self;
    if (op.kind == OpKind::use || op.kind == OpKind::agree) trainer_waits(op, self);
  }

  // Lets the operation go on with `seconds` of what it shares with others, when it is free.
  static void take_turn(SharedTime& shared, double seconds, Span& span, std::size_t self) {
    const SharedTime::Taken taken = shared.take(self, span.end, seconds);
    span.end = taken.end;
    if (taken.after == SharedTime::no_task) return;
    span.begin = taken.begin;
    span.held_up_by = taken.after;
  }

  void use_links(const Op& op, Span& span, std::size_t self) {
    const LinkSeconds needed = seconds_on_links(op, in_.placement, in_.machine);
    span.end -= needed.sum();
    take_turn(links_inside_, needed.inside, span, self);
    take_turn(links_across_, needed.across, span, self);
  }

  // All later operations begin when the trainer has passed this one.
  void trainer_waits(const Op& op, std::size_t self) {
    const Span& span = spans_[self];
    const double until = op.kind == OpKind::use ? span.end - span.busy : span.end;
    exposed_[index(op.phase)] += std::max(0.0, until - trainer_free_);
    trainer_free_ = std::max(trainer_free_, span.end);
    came_by_ = self;
  }

  void wait_for_all() {
    const auto last = std::max_element(spans_.begin() + static_cast<std::ptrdiff_t>(begin_of_step_), spans_.end(),
                                       [](const Span& a, const Span& b) { return a.end < b.end; });
    if (last == spans_.end() || last->end <= trainer_free_) return;
    exposed_[index(Phase::step)] += last->end - trainer_free_;
    trainer_free_ = last->end;
    came_by_ = static_cast<std::size_t>(last - spans_.begin());
  }

  // Walks the critical path from the end of the step to its beginning, by the operation that each one waited for last.
  void follow_back(Simulation& result) const {
    for (std::size_t at = came_by_; at != none && spans_[at].end > trainer_at_beginning_; at = spans_[at].held_up_by) {
      const Op& op = in_.program.ops[at % size_];
      result.critical[index(op.lane)] += spans_[at].end - std::max(spans_[at].begin, trainer_at_beginning_);
    }
  }

  const SimulationInput& in_;
  std::size_t size_;
  std::vector<Span> spans_;  // the spans of all steps
  SharedTime cores_;
  SharedTime products_;      // products on a GPU
  SharedTime links_inside_;  // links of a host; gathers and reductions have lanes of their own, and the same links
  SharedTime links_across_;
  std::array<std::size_t, lane_count> lane_last_{};
  std::array<double, phase_count> exposed_{};
  std::size_t begin_of_step_ = 0;
  std::size_t came_by_ = none;
  double trainer_free_ = 0;
  double trainer_at_beginning_ = 0;
  double fetched_ = 0;  // seconds of fetches that have not delayed `disk` yet
};

}  // namespace

Simulation simulate(const SimulationInput& input) { return Walk(input).result(); }

Simulation& Simulation::operator+=(const Simulation& next) {
  const auto add = [](auto& sums, const auto& values) {
    for (std::size_t i = 0; i < sums.size(); ++i)
      sums[i] += values[i];
  };
  seconds += next.seconds;
  add(exposed, next.exposed);
  add(busy, next.busy);
  add(critical, next.critical);
  add(bytes, next.bytes);
  return *this;
}

std::vector<SimulatedOp> timeline_of(const SimulationInput& input) { return Walk(input).timeline(); }

SharedTime::Taken SharedTime::take(std::size_t task, double from, double seconds) {
  Taken last{.begin = from, .end = from};
  auto next = std::ranges::upper_bound(taken_, from, {}, &Piece::end);
  while (seconds > 0) {
    const double free = next == taken_.end() ? seconds : std::min(seconds, next->begin - last.end);
    if (free > 0) {
      last.end += free;
      seconds -= free;
      next = taken_.insert(next, {last.begin, last.end, task}) + 1;
    } else {
      last = {.begin = next->end, .end = next->end, .after = next->task};
      ++next;
    }
  }
  return last;
}

}  // namespace ballast
