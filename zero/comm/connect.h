// How a process comes to its communicator.
#pragma once

#include "kernels/backend.h"
#include "kernels/runtime/accounts.h"
#include "kernels/runtime/log.h"
#include "zero/comm/communicator.h"
#include "zero/comm/job.h"

namespace ballast {

// How bytes go in host memory; `fastest` is shared memory for ranks of one machine, and Gloo for others. Where a way that is
// asked for cannot be had, that is an error. Memory of GPUs is for groups that are split off with a channel.
enum class Way { fastest, shared_memory, gloo };

struct ConnectOptions {
  kernels::Backend& backend;  // makes the sums; outlives the communicator, as the accounts do
  MemoryAccounts& accounts;   // where the communicator's memory is booked
  Environment environment{};
  std::optional<Launch> launch{};  // instead of what the environment says
  KeyValueStore* store = nullptr;  // to find each other by, instead of an address; needed until connect() returns
  std::optional<std::chrono::milliseconds> timeout{};  // of every wait; BALLAST_TIMEOUT (seconds), or 5 minutes
  Way way = Way::fastest;
  Log* log = nullptr;  // outlives the communicator
};

// Returns when all ranks are there. Without a launcher: one rank, alone.
std::unique_ptr<Communicator> connect(const ConnectOptions& options);

}  // namespace ballast
