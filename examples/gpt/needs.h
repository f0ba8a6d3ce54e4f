// What a run asks of this process's memory and of its drives: told, and refused, before anything is reserved.
#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "examples/gpt/model.h"
#include "kernels/runtime/resident_memory.h"

namespace ballast::gpt {

struct RunOptions;

// This process's, which may be several ranks.
struct MemoryOptions {
  std::size_t ranks_here = 1;          // as threads
  std::optional<std::size_t> limit{};  // that the process was given: it cannot hold more
  ResidentMemory before{};             // when the program began
};

struct Needs {
  struct Drive {
    std::filesystem::path directory;
    std::size_t available = 0;
  };

  std::size_t reserved = 0;  // of memory: what the ledgers of its ranks say
  std::size_t activations = 0;
  std::size_t libraries = 0;  // what they, stacks and malloc keep, whatever the run: measured, not counted
  std::size_t on_drives = 0;
  std::vector<Drive> drives{};

  std::size_t memory() const { return reserved + activations + libraries; }
};

Needs needs_of(const RunOptions& options, const Plan& plan);

// B2004 where the memory, B2202 where the drives are too small.
void require_enough(const Needs& needs, const RunOptions& options, const Plan& plan);

// B2004 where more has become resident than was allowed.
void require_kept(const ResidentMemory& resident, const MemoryOptions& options);

// What was taken beyond the memory that was announced, as a part of that: neither libraries' code nor what was there before.
double excess(const ResidentMemory& resident, const Needs& needs, const MemoryOptions& options);

}  // namespace ballast::gpt
