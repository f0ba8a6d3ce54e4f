// What all ranks do, or none of them.
#pragma once

#include <functional>

#include "zero/comm/communicator.h"

namespace ballast {

// Does `work` on this rank, and returns when all ranks have done it. Where it fails on any, every rank throws the error of the
// first rank that failed, which names that rank: none is left waiting for the others.
void on_all_ranks(Communicator& world, const std::function<void()>& work);

}  // namespace ballast
