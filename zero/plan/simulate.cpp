#include "zero/plan/simulate.h"

#include <algorithm>
#include <utility>

#include "zero/plan/shared_time.h"

namespace ballast {
namespace {

constexpr int rounds = 3;

std::size_t index(Lane lane) { return static_cast<std::size_t>(lane); }
std::size_t index(Phase phase) { return static_cast<std::size_t>(phase); }

// When an operation ran, the last time without a break, and which one it waited for before that.
struct Span {
  double begin = 0;
  double end = 0;
  double busy = 0;  // more than from begin to end where there were breaks
  std::size_t held_up_by = none;
};

bool needs_cores(const Op& op) { return !is_of_drives(op.lane) && op.kind != OpKind::agree; }

class Walk {
 public:
  explicit Walk(const SimulationInput& input) : in_(input), size_(input.program.ops.size()) {
    lane_last_.fill(none);
    for (int round = 0; round < rounds; ++round) {
      begin_of_round_ = spans_.size();
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
      const Span& span = spans_[begin_of_round_ + i];
      result.busy[index(op.lane)] += span.busy;
      result.bytes[index(op.lane)] += bytes_moved(op, in_.placement);
    }
    follow_back(result);
    return result;
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
      if (!wait.of_last_round) after(begin_of_round_ + wait.op);
      if (wait.of_last_round && begin_of_round_ > 0) after(begin_of_round_ - size_ + wait.op);
    }
    span.busy = seconds_of(op, in_);
    span.end = span.begin + span.busy;
    if (in_.machine.shares_cores && needs_cores(op)) take_turns(span, self);
    if (op.lane == Lane::fetch) fetched_ += span.busy;
    if (op.lane == Lane::disk) span.end += std::exchange(fetched_, 0.0);
    spans_.push_back(span);
    lane_last_[index(op.lane)] = self;
    if (op.kind == OpKind::use || op.kind == OpKind::agree) trainer_waits(op, self);
  }

  void take_turns(Span& span, std::size_t self) {
    const SharedTime::Taken taken = cores_.take(self, span.begin, span.busy);
    span.begin = taken.begin;
    span.end = taken.end;
    if (taken.after != SharedTime::nobody) span.held_up_by = taken.after;
  }

  // Everything listed later begins when the trainer has come by here.
  void trainer_waits(const Op& op, std::size_t self) {
    const Span& span = spans_[self];
    const double until = op.kind == OpKind::use ? span.end - span.busy : span.end;
    exposed_[index(op.phase)] += std::max(0.0, until - trainer_free_);
    trainer_free_ = std::max(trainer_free_, span.end);
    came_by_ = self;
  }

  void wait_for_all() {
    const auto last = std::max_element(spans_.begin() + static_cast<std::ptrdiff_t>(begin_of_round_), spans_.end(),
                                       [](const Span& a, const Span& b) { return a.end < b.end; });
    if (last == spans_.end() || last->end <= trainer_free_) return;
    exposed_[index(Phase::step)] += last->end - trainer_free_;
    trainer_free_ = last->end;
    came_by_ = static_cast<std::size_t>(last - spans_.begin());
  }

  // From the end of the step to its beginning, by what each operation waited for last.
  void follow_back(Simulation& result) const {
    for (std::size_t at = came_by_; at != none && spans_[at].end > trainer_at_beginning_; at = spans_[at].held_up_by) {
      const Op& op = in_.program.ops[at % size_];
      result.critical[index(op.lane)] += spans_[at].end - std::max(spans_[at].begin, trainer_at_beginning_);
    }
  }

  const SimulationInput& in_;
  std::size_t size_;
  std::vector<Span> spans_;  // of all rounds
  SharedTime cores_;
  std::array<std::size_t, lane_count> lane_last_{};
  std::array<double, phase_count> exposed_{};
  std::size_t begin_of_round_ = 0;
  std::size_t came_by_ = none;
  double trainer_free_ = 0;
  double trainer_at_beginning_ = 0;
  double fetched_ = 0;  // seconds of the drives that `disk` has still to do without
};

double part_of_others(std::size_t ranks) { return static_cast<double>(ranks - 1) / static_cast<double>(ranks); }

}  // namespace

std::size_t bytes_moved(const Op& op, const Placement& placement) {
  switch (op.kind) {
    case OpKind::clear:
    case OpKind::read:
    case OpKind::read_first: return op.to.bytes;
    case OpKind::gather: return op.to.bytes - op.from.bytes;
    case OpKind::reduce: {
      const bool shards = op.ranks == Ranks::shard_group;
      const double part = shards ? part_of_others(placement.shards) : 2 * part_of_others(placement.replicas);
      return static_cast<std::size_t>(part * static_cast<double>(op.from.bytes));
    }
    case OpKind::upload:
    case OpKind::download:
    case OpKind::norm:
    case OpKind::write: return op.from.bytes;
    case OpKind::keep: return 2 * op.from.bytes;
    case OpKind::accumulate: return op.from.bytes + 2 * op.to.bytes;
    case OpKind::update: return op.from.bytes + 2 * op.to.bytes + 2 * op.state.bytes;
    case OpKind::use:
    case OpKind::agree:
    case OpKind::commit:
    case OpKind::meet: return 0;
  }
  return 0;
}

double seconds_of(const Op& op, const SimulationInput& input) {
  const Machine& machine = input.machine;
  const auto bytes = static_cast<double>(bytes_moved(op, input.placement));
  const auto memory = [&](const Piece& piece) {
    return input.program.slots[piece.slot].tier == Tier::device ? machine.device_memory : machine.host_memory;
  };
  switch (op.kind) {
    case OpKind::read:
    case OpKind::read_first: return bytes / machine.read;
    case OpKind::write: return bytes / machine.write;
    case OpKind::upload: return bytes / machine.upload;
    case OpKind::download: return bytes / machine.download;
    case OpKind::gather: return machine.collective_latency + bytes / machine.gather;
    case OpKind::reduce: return machine.collective_latency + bytes / machine.reduce;
    case OpKind::clear: return bytes / memory(op.to);
    case OpKind::norm:
    case OpKind::keep:
    case OpKind::accumulate:
    case OpKind::update: return bytes / memory(op.from);
    case OpKind::agree:
    case OpKind::meet: return 2 * machine.collective_latency;
    case OpKind::commit: return machine.commit_latency;
    case OpKind::use: {
      const UnitWork& work = input.work[op.unit];
      return op.phase == Phase::forward ? work.forward_seconds : work.backward_seconds;
    }
  }
  return 0;
}

Simulation simulate(const SimulationInput& input) { return Walk(input).result(); }

}  // namespace ballast
