#include "zero/plan/simulate.h"

#include <algorithm>
#include <utility>

namespace ballast {
namespace {

constexpr int walked_steps = 3;

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
  return !passes_host(op) && (op.kind == OpKind::gather || op.kind == OpKind::reduce || op.kind == OpKind::collect ||
                              op.kind == OpKind::distribute);
}

// The host's memory of a machine with GPUs. Copies over links and of drives take turns there; its processor gets what they leave.
class HostMemory {
 public:
  // Returns the end of a copy that needs all of the memory for `seconds` between `begin` and `end`.
  double copy(std::size_t task, Lane lane, double begin, double end, double seconds) {
    end = std::max(end, turns_.take(task, begin, seconds).end);
    const double part = seconds / (end - begin);
    copies_[index(lane)].push_back({begin, end, part});
    owed_ += amount(works_, begin, end, [&](const Use& work) { return std::max(0.0, part - work.part); });
    return end;
  }

  // Returns the end of an operation of the processor, which needs all of the memory for a part of its seconds. Where copies leave it
  // less, it takes longer, and meets more of them.
  double work(double begin, double seconds, double needed) {
    needed += std::exchange(owed_, 0.0);
    double end = begin + seconds;
    double left = 0;  // of the memory, in seconds
    do {
      end = std::max(end, end - left);
      left = end - begin - needed;
      for (const std::vector<Use>& lane : copies_)
        left -= amount(lane, begin, end, [](const Use& copy) { return copy.part; });
    } while (left < -std::max(shortest, end * resolution));
    if (seconds > 0) works_.push_back({begin, end, std::max(0.0, left) / (end - begin)});
    return end;
  }

 private:
  static constexpr double shortest = 1e-9;     // seconds
  static constexpr double resolution = 1e-14;  // of times, which rounding changes by less

  struct Use {
    double begin;
    double end;
    double part;  // of the memory: what a copy takes, and what an operation leaves
  };

  // Adds up what each use between two times has for a second. Uses of a lane are sorted by time.
  template <class Part>
  static double amount(const std::vector<Use>& lane, double begin, double end, const Part& part) {
    double sum = 0;
    for (auto use = lane.rbegin(); use != lane.rend() && use->end > begin; ++use)
      sum += std::max(0.0, std::min(end, use->end) - std::max(begin, use->begin)) * part(*use);
    return sum;
  }

  SharedTime turns_;
  std::array<std::vector<Use>, lane_count> copies_{};
  std::vector<Use> works_;
  double owed_ =
      0;  // seconds of copies that came to operations which are simulated already: the next one is later for them
};

class Walk {
 public:
  explicit Walk(const SimulationInput& input) : in_(input), size_(input.program.ops.size()) {
    lane_last_.fill(none);
    for (int step = 0; step < walked_steps; ++step) {
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
                          .is_earlier_steps = i < begin_of_step_,
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
      if (!wait.is_last_steps) after(begin_of_step_ + wait.op);
      if (wait.is_last_steps && begin_of_step_ > 0) after(begin_of_step_ - size_ + wait.op);
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
      use_host_memory(op, span, self);
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

  void use_host_memory(const Op& op, Span& span, std::size_t self) {
    const double seconds = seconds_of_host_memory(op, in_);
    if (seconds == 0) return;
    span.end = op.lane == Lane::host ? host_memory_.work(span.begin, span.end - span.begin, seconds)
                                     : host_memory_.copy(self, op.lane, span.begin, span.end, seconds);
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
  HostMemory host_memory_;
  std::array<std::size_t, lane_count> lane_last_{};
  std::array<double, phase_count> exposed_{};
  std::size_t begin_of_step_ = 0;
  std::size_t came_by_ = none;
  double trainer_free_ = 0;
  double trainer_at_beginning_ = 0;
  double fetched_ = 0;  // seconds of fetches that have not delayed `disk` yet
};

constexpr std::size_t units_on_device = 2;

class Traffic {
 public:
  Traffic(const Program& program, std::span<const UnitWork> work, Tier tier) : in_(program), work_(work), tier_(tier) {}

  std::vector<Op> ops() && {
    for (std::size_t i = 0; i < in_.ops.size(); ++i) {
      const Op& op = in_.ops[i];
      const bool moves = op.kind == OpKind::use && work_[op.unit].offloaded_bytes > 0;
      if (moves && op.phase == Phase::backward) bring(i);
      moved_to_.push_back(add(op));
      if (!moves) continue;
      if (op.phase == Phase::backward) {
        wait_for_return(ops_.back());
      } else {
        wait_for_room(ops_.back());
        take_away(op.unit);
      }
    }
    renumber();
    return std::move(ops_);
  }

 private:
  struct Saved {
    std::size_t unit = 0;
    std::size_t left = none;      // the operation that takes it away
    std::size_t returned = none;  // the operation that brings it back
  };

  std::size_t add(Op op) {
    ops_.push_back(std::move(op));
    return ops_.size() - 1;
  }

  // The program's own waits name operations by their numbers there. They come before those that were added here.
  void renumber() {
    for (std::size_t i = 0; i < in_.ops.size(); ++i) {
      std::vector<Wait>& after = ops_[moved_to_[i]].after;
      for (std::size_t own = 0; own < in_.ops[i].after.size(); ++own) {
        after[own].op = static_cast<std::uint32_t>(moved_to_[after[own].op]);
      }
    }
  }

  std::size_t copy(OpKind kind, Lane lane, Phase phase, const Saved& saved, std::size_t after) {
    const Piece bytes{.bytes = work_[saved.unit].offloaded_bytes};
    return add({.kind = kind,
                .lane = lane,
                .phase = phase,
                .unit = saved.unit,
                .from = bytes,
                .to = bytes,
                .after = {{static_cast<std::uint32_t>(after), false}}});
  }

  void take_away(std::size_t unit) {
    Saved saved{.unit = unit};
    saved.left = copy(OpKind::download, Lane::download, Phase::forward, saved, ops_.size() - 1);
    if (tier_ == Tier::nvme) saved.left = copy(OpKind::write, Lane::disk, Phase::forward, saved, saved.left);
    saved_.push_back(saved);
  }

  void wait_for_room(Op& use) const {
    if (saved_.size() >= units_on_device) wait(use, saved_[saved_.size() - units_on_device].left);
  }

  // Brings back the activations of this backward use, unless it was done ahead, and those of the next one.
  void bring(std::size_t use) {
    bring_last_of(in_.ops[use].unit);
    for (std::size_t next = use + 1; next < in_.ops.size(); ++next) {
      const Op& op = in_.ops[next];
      if (op.kind != OpKind::use || work_[op.unit].offloaded_bytes == 0) continue;
      if (op.phase == Phase::backward) bring_last_of(op.unit);
      return;
    }
  }

  void bring_last_of(std::size_t unit) {
    Saved* const saved = last_of(unit);
    if (saved == nullptr || saved->returned != none) return;
    std::size_t from = saved->left;
    if (tier_ == Tier::nvme) from = copy(OpKind::read, Lane::disk, Phase::backward, *saved, from);
    saved->returned = copy(OpKind::upload, Lane::upload, Phase::backward, *saved, from);
  }

  void wait_for_return(Op& use) {
    Saved* const saved = last_of(use.unit);
    if (saved == nullptr) return;
    wait(use, saved->returned);
    saved_.erase(saved_.begin() + (saved - saved_.data()));
  }

  Saved* last_of(std::size_t unit) {
    const auto found =
        std::find_if(saved_.rbegin(), saved_.rend(), [&](const Saved& each) { return each.unit == unit; });
    return found == saved_.rend() ? nullptr : &*found;
  }

  static void wait(Op& op, std::size_t other) { op.after.push_back({static_cast<std::uint32_t>(other), false}); }

  const Program& in_;
  std::span<const UnitWork> work_;
  Tier tier_;
  std::vector<Op> ops_;
  std::vector<std::size_t> moved_to_;  // the number now, for each operation of the program
  std::vector<Saved> saved_;           // those that are saved and not used in backward yet
};

}  // namespace

Simulation simulate(const SimulationInput& input) { return Walk(input).result(); }

Simulation& Simulation::operator+=(const Simulation& next) {
  each_figure(*this, next, [](auto& sum, const auto& value) { sum += value; });
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

Program with_activations(const Program& program, std::span<const UnitWork> work, Tier tier) {
  Program with = program;
  if (tier != Tier::device) with.ops = Traffic(program, work, tier).ops();
  return with;
}

}  // namespace ballast
