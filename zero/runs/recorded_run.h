// The records of a run or of a checkpoint, which are read without a training.
#pragma once

#include <ballast/model.h>
#include <ballast/records.h>
#include <ballast/view.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/update.h"
#include "optim/state_layout.h"

namespace ballast {

// The newest commit that all ranks have. One thread uses it. A training may overwrite the records meanwhile: then reads throw B3202.
class RecordedRun {
 public:
  // Opens the run `name` in a directory that has the records of all ranks, and writes nothing. Throws B1001 if it has not begun,
  // B1009 if the records of a rank are missing, and B3202 if they are damaged.
  RecordedRun(const std::filesystem::path& directory, const std::string& name);
  RecordedRun(RecordedRun&&) = delete;
  ~RecordedRun();

  std::uint64_t step() const;
  std::size_t ranks() const;
  const std::string& rule() const;             // as optim::name() has it, and the number of its own values
  const optim::StateNames& names() const;      // torch's names of the moments
  std::vector<std::byte> note();               // the note of a rank: with trainings of Python they are the same on all
  const std::vector<Tensor>& tensors() const;  // the trained ones, in the order of units, with names of their own
  void copy(const std::string& tensor, Range range, const TileMemory& into);  // into as many elements

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The names of the runs that have records in a directory, in order.
std::vector<std::string> runs_in(const std::filesystem::path& directory);

}  // namespace ballast
