// Connects a process to the other ranks of its job, with parts that the caller owns.
#pragma once

#include <ballast/comm.h>

#include "kernels/backend.h"
#include "kernels/runtime/environment.h"

namespace ballast {

// They outlive the communicator and all groups that are split from it.
struct ConnectParts {
  kernels::Backend& backend;  // adds
  MemoryAccounts& accounts;   // book the communicator's memory
  Environment environment{};
};

// Adds with the backend of the parts, whatever threads the options name.
std::unique_ptr<Communicator> connect(const ConnectOptions& options, const ConnectParts& parts);

// Of every wait: that of the options, or BALLAST_TIMEOUT, or five minutes.
std::chrono::milliseconds timeout_of(const ConnectOptions& options, const Environment& environment);

}  // namespace ballast
