// Connects a process to the other ranks of its job.
#pragma once

#include "kernels/backend.h"
#include "kernels/runtime/accounts.h"
#include "kernels/runtime/log.h"
#include "zero/comm/communicator.h"
#include "zero/comm/job.h"

namespace ballast {

// The transport for host memory. `fastest` is shared memory if all ranks are on one machine, else Gloo. It is an error
// (B2301) if the named transport is not available. GPU memory needs a group that is split off with a channel.
enum class HostTransport { fastest, shared_memory, gloo };

struct ConnectOptions {
  kernels::Backend& backend;  // adds; outlives the communicator, as the accounts do
  MemoryAccounts& accounts;   // book the communicator's memory
  Environment environment{};
  std::optional<Launch> launch{};                      // replaces the environment's description
  KeyValueStore* store = nullptr;                      // replaces the address of rank 0; needed until connect() returns
  std::optional<std::chrono::milliseconds> timeout{};  // of every wait; BALLAST_TIMEOUT (seconds), or 5 minutes
  HostTransport transport = HostTransport::fastest;
  Log* log = nullptr;  // outlives the communicator
};

// Returns when all ranks are connected. Without a launcher, there is only one rank.
std::unique_ptr<Communicator> connect(const ConnectOptions& options);

}  // namespace ballast
