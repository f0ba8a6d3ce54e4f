// Predicts the time of a step on any machine. An operation begins when the trainer has come to it, its lane is free,
// and the operations that it waits for are done. On a CPU it takes turns with all others. On GPUs gathers and reductions
// take turns on the links between ranks, and products of updates with those of the model; the host's processor gets what copies
// over links and of drives leave of its memory. Three steps are walked and the last one counts, because steps overlap.
#pragma once

#include <vector>

#include "zero/plan/program_cost.h"

namespace ballast {

Simulation simulate(const SimulationInput& input);

// Calls change(value, other) for each figure of a step and that of another one.
template <class Change>
void each_figure(Simulation& of, const Simulation& other, const Change& change) {
  const auto each = [&](auto& values, const auto& others) {
    for (std::size_t i = 0; i < values.size(); ++i)
      change(values[i], others[i]);
  };
  change(of.seconds, other.seconds);
  each(of.exposed, other.exposed);
  each(of.busy, other.busy);
  each(of.critical, other.critical);
  each(of.bytes, other.bytes);
}

// When an operation runs, in seconds from the beginning of the trainer's step. If the operation takes turns with
// others, this is its last turn.
struct SimulatedOp {
  std::size_t op = 0;  // an operation of the program
  bool is_earlier_steps = false;
  double begin = 0;
  double end = 0;
};

// The operations that run during the trainer's step, in the order of issue. An operation may begin before that step or end
// after it, because steps overlap.
std::vector<SimulatedOp> timeline_of(const SimulationInput& input);

// The traffic of activations that leave the device in forward and return in backward. They are no operations of the
// engine: ActivationStore moves them (offload/activation_store.h). For the simulator they share the lanes with these.
// Returns the operations of the program with copies of each unit's activations: to the host, and to a drive if `tier` is
// that, after each forward use; and back before its backward use, while the use before that runs. A forward use begins
// when the activations of the use before the last one have left, because the device holds no more than those of two.
// The result is for the simulator only.
Program with_activations(const Program& program, std::span<const UnitWork> work, Tier tier);

// Time on a processor that several tasks use in turn.
class SharedTime {
 public:
  static constexpr std::size_t no_task = static_cast<std::size_t>(-1);
  struct Taken {
    double begin = 0;  // the begin of the last piece
    double end = 0;
    std::size_t after = no_task;  // the task that had the processor just before that piece; none if it was free
  };

  // Takes `seconds` of the time that is free from `from` on, in as many pieces as needed.
  Taken take(std::size_t task, double from, double seconds);

 private:
  struct Piece {
    double begin;
    double end;
    std::size_t task;
  };
  std::vector<Piece> taken_;  // sorted by time
};

}  // namespace ballast
