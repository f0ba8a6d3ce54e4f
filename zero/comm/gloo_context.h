// A context of Gloo over connections that are there already. Gloo's own way to connect them listens at ports of its own, where it
// admits any process, and ends this one if a connection is reset at once.
#pragma once

#include <gloo/context.h>

#include <chrono>
#include <memory>
#include <vector>

#include "kernels/runtime/descriptor.h"

namespace ballast {

// Starts Gloo's thread. `links` are connected sockets, by rank.
std::unique_ptr<gloo::Context> gloo_context(std::size_t rank, std::vector<Descriptor> links,
                                            std::chrono::milliseconds timeout);

}  // namespace ballast
