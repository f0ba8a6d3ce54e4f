// The records of a run or of a checkpoint, which are read without a training.
#pragma once

#include <ballast/model.h>
#include <ballast/view.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "kernels/backend.h"
#include "kernels/update.h"
#include "optim/state_layout.h"
#include "zero/comm/thread_communicator.h"
#include "zero/runs/search.h"

namespace ballast {

// The newest commit that all ranks have. One thread uses it. A training may overwrite the records meanwhile: then reads throw B3202.
class RecordedRun {
 public:
  // Opens the run `name` in a directory that has the records of all ranks, and writes nothing. Throws B1001 if it has not begun,
  // B1009 if the records of a rank are missing, and B3202 if they are damaged.
  RecordedRun(const std::filesystem::path& directory, const std::string& name);
  RecordedRun(RecordedRun&&) = delete;

  std::uint64_t step() const { return run_.step; }
  std::size_t ranks() const { return run_.placement.ranks(); }
  const std::string& rule() const {
    return state_.described().rule;
  }  // as optim::name() has it, and the number of its own values
  const optim::StateNames& names() const { return names_; }  // torch's names of the moments
  // The note of a rank: with trainings of Python they are the same on all.
  std::span<const std::byte> note() { return records_.note_of(run_.copies.front().front()); }
  // The trained ones, in the order of units, with names of their own.
  const std::vector<Tensor>& tensors() const { return tensors_; }
  void copy(const std::string& tensor, Range range, const TileMemory& into);  // into as many elements

 private:
  WholeRun whole_run() const;
  RecordedState recorded_state();

  Log quiet_{[](Level, std::string_view) {}};
  RecordOptions options_;
  const Goal goal_{
      options_.run, fmt::format("read run \"{}\"", options_.run),
      "Bring the records of all ranks to the directory. If a training continues the run, wait until it has "
      "ended."};
  std::unique_ptr<kernels::Backend> backend_ = kernels::cpu_backend({.threads = 1});
  std::unique_ptr<Communicator> alone_ = lone_communicator(*backend_);
  std::unique_ptr<offload::IoQueue> queue_ = offload::open_queue({.log = &quiet_});
  RunDrives drives_{options_, {queue_.get()}};
  RunSearch search_{drives_, *alone_, goal_};
  std::vector<SeenRecords> seen_;
  WholeRun run_;
  optim::StateNames names_{};
  RecordedState state_;
  EarlierRecords records_{drives_, run_, run_.shape_of(state_, known_run_id(seen_))};
  std::vector<Tensor> tensors_{};
};

// The names of the runs that have records in a directory, in order.
std::vector<std::string> runs_in(const std::filesystem::path& directory);

}  // namespace ballast
