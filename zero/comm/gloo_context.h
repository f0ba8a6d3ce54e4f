// A context of Gloo over connections that are there already. Gloo's own way to connect them listens at ports of its own, where it
// admits any process, and ends this one if a connection is reset at once.
#pragma once

#include <gloo/context.h>

#include <chrono>
#include <memory>
#include <string_view>
#include <vector>

#include "kernels/runtime/descriptor.h"

namespace ballast {

// Starts Gloo's thread. `links` are connected sockets, by rank. Throws B2301 if Gloo cannot start, and B2401 as below.
std::unique_ptr<gloo::Context> gloo_context(std::size_t rank, std::vector<Descriptor> links,
                                            std::chrono::milliseconds timeout);

// Gloo reports errors only as text. Throws B2401 if it says that the process may open no more descriptors.
void require_descriptors(std::string_view gloo_says);

}  // namespace ballast
