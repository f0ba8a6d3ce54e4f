// The communicator over any transport. Sums are made by the backend in rank order, so bits do not depend on the transport.
#pragma once

#include <memory>

#include "kernels/backend.h"
#include "zero/comm/communicator.h"
#include "zero/comm/transport.h"

namespace ballast {

// The backend outlives it and all that is split from it. It is called by the thread that calls the communicator.
std::unique_ptr<Communicator> make_collectives(std::unique_ptr<Transport> transport, kernels::Backend& backend);

}  // namespace ballast
