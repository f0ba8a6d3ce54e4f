// What a framework needs of a training beside its steps: its state by tile, the memory that it takes and frees, and the commits of
// its run. TensorState shows the state by tensor.
#pragma once

#include <ballast/training.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ballast {

// All ranks make the same calls together, but for wait_for_parameters(), wait_for_commit() and functions that only read. The
// training outlives this object.
class TrainingState {
 public:
  explicit TrainingState(Training& training) : impl_(training.impl_.get()) {}

  // --- In a step.
  // Acquires the parameters as ranks keep them, like forward(), even if Wire::gather is not exact: to write or export
  // them. If Wire::gather is not exact, the plan counts this as a use of its own: a step whose
  // trace lacks it goes off plan, until the same order comes twice in a row.
  Lease exact_parameters(std::size_t unit);
  // The norm of each tensor, by unit: see Training::gradient_norm().
  std::vector<std::vector<double>> tensor_norms(double loss_scale = 1.0, std::optional<std::size_t> micro_steps = {});
  // Shows the gradients that the step would use, as sums over ranks and micro-steps, in this rank's shards. The visitor may change
  // them: norms and the step use the changed ones. Work that the visitor issues to a GPU must be done when it returns.
  void visit_gradients(const GradientVisitor& visit, std::optional<std::size_t> micro_steps = {});
  // step() returns while full parameters are still updated and gathered, if Schedule::overlap_gathers is set. This
  // waits for those of a unit, in the order of the trainer's stream. Each rank may call it as it likes.
  void wait_for_parameters(std::size_t unit);
  std::string program() const;  // the program that runs now: one slot or operation a line
  void wait_for_commit();  // waits until state on drives is that of the last step, also in the middle of the next one

  // --- Between steps.
  // Throws B1007 in the middle of a step, for a call that cannot `what`.
  void require_between_steps(std::string_view what) const;
  // Frees the device tier's memory until reload(); no other call is allowed meanwhile. With `parameters` false, full
  // parameters stay on the device; otherwise their addresses change. If `agree` throws, nothing has changed.
  void offload(bool parameters = true, const AgreeOnMemory& agree = throw_own);
  void reload(const AgreeOnMemory& agree = throw_own);
  // Gives gathered parameters this much memory from now on, at least what prefetching needs and at most what all of them take.
  // Those that fit stay from forward to backward. If `agree` throws, nothing has changed.
  void keep_gathered(std::size_t bytes, const AgreeOnMemory& agree = throw_own);
  std::size_t gathered_bytes() const;  // the memory that gathered parameters have now; 0 if none are gathered

  // Show the local shard, tile by tile, in host memory. TensorState shows it by tensor. change() commits changed tiles
  // on drives together, as those of the step Training::steps(), once `agree` has returned. The records of a run stay as they were
  // if it throws; other state may be partly changed. All ranks must change full parameters to the same values. If a change fails on one
  // rank of a run, no rank changes the run: that rank throws its own error, the others throw B3301.
  void visit(
      const TileVisitor& visit, const TileFilter& which = [](const LocalTile&) { return true; });
  void change(
      const TileVisitor& change, const std::function<void()>& agree = [] {});
  std::vector<LocalTile> tiles() const;  // listed in the order of visits; without their memory
  void set_steps(std::uint64_t steps);   // called after loading state from elsewhere

  // --- Runs and memory.
  const std::optional<LostRun>& lost() const;  // the run that has lost its steps, if RecordOptions::begins_again
  RunPoint committed() const;                  // the last commit of a run
  // The round of joint runs that later commits belong to. With one, a step that is skipped is committed too.
  void set_round(const JointRound& round);
  View full_parameters(std::size_t unit);  // the parameters of a unit that is kept full, as it is laid out
  void parameters_changed();               // the caller has written to full parameters that have no other copy
  // Reads memory of the training, on a GPU too, after the work in the trainer's stream.
  void read_memory(const ConstView& view, std::byte* into) const;

  std::size_t unreserved_bytes() const;  // of parameters and state on a GPU, before the training begins
  std::string unpinned_because() const;  // if not empty, copies to and from a GPU are slow

 private:
  Training::Impl* impl_;
};

}  // namespace ballast
