// The memory of this process and the drive space that a run needs, and the work of its steps on drives. They are reported and
// checked before anything is reserved.
#pragma once

#include <ballast/training.h>

#include <filesystem>
#include <optional>
#include <vector>

#include "examples/llama/model.h"
#include "kernels/runtime/host_limits.h"

namespace ballast::benchmarks {

struct RunOptions;

// The memory of this process, which may run several ranks.
struct MemoryOptions {
  std::size_t ranks_here = 1;          // the kernel enforces it
  std::optional<std::size_t> limit{};  // the kernel enforces this limit
  ResidentMemory before{};             // the resident memory when the program began
};

struct Needs {
  struct Drive {
    std::filesystem::path directory;
    std::size_t available = 0;
  };

  std::size_t reserved = 0;  // memory in the ledgers of its ranks
  std::size_t activations = 0;
  std::size_t libraries = 0;  // memory of libraries, stacks and malloc, the same for every run: a measured constant
  std::size_t on_drives = 0;
  std::vector<Drive> drives{};

  std::size_t memory() const { return reserved + activations + libraries; }
};

// The work of one rank in a step that follows the program.
struct DriveWork {
  std::size_t read_bytes = 0;
  std::size_t written_bytes = 0;
  std::size_t record_bytes = 0;  // bytes of one read or write
  std::size_t records = 0;       // reads or writes in flight at once
};

DriveWork drive_work_of(const CompiledPlan& plan);

Needs needs_of(const RunOptions& options, const Plan& plan);

// Throws B2004 if the memory is too small, B2202 if a drive is.
void require_enough(const Needs& needs, const RunOptions& options, const Plan& plan);

// Throws B2004 if more is resident than the limit allows.
void require_kept(const ResidentMemory& resident, const MemoryOptions& options);

// Returns the resident memory beyond the announced memory, relative to the announced memory. The code of libraries, and
// memory that was resident before, do not count.
double excess(const ResidentMemory& resident, const Needs& needs, const MemoryOptions& options);

}  // namespace ballast::benchmarks
