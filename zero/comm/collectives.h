// The communicator over any transport. The backend adds in rank order, so the bits do not depend on the transport.
#pragma once

#include <ballast/comm.h>

#include <memory>

#include "kernels/backend.h"
#include "zero/comm/transport.h"

namespace ballast {

// The backend outlives the communicator and all groups that are split from it, which keep `owned` alive. It is called by the
// thread that calls the communicator.
std::unique_ptr<Communicator> make_collectives(std::unique_ptr<Transport> transport, kernels::Backend& backend,
                                               std::shared_ptr<void> owned = {});

}  // namespace ballast
