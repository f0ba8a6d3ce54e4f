#include <ballast/comm.h>

#include "zero/comm/purpose.h"

namespace ballast {

void Communicator::all_reduce(std::span<std::int64_t> values) { all_reduce(values, Purpose::values); }

}  // namespace ballast
