// Work that succeeds on all ranks or fails on all.
#pragma once

#include <ballast/comm.h>

#include <functional>

namespace ballast {

// Does `work` on this rank and returns when all ranks have done theirs. If it fails on any rank, every rank throws the
// error of the lowest failed rank, with its number: no rank waits for one that failed. All ranks of the group call.
void on_all_ranks(Communicator& world, const std::function<void()>& work);

}  // namespace ballast
