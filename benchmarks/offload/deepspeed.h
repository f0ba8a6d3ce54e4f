// DeepSpeed's async_io in its own process, see deepspeed_aio.py.
#pragma once

#include "benchmarks/offload/contest.h"
#include "benchmarks/offload/tensor_files.h"

namespace ballast::benchmarks {

Sample run_deepspeed(const std::string& program, const TensorFiles& files);

}  // namespace ballast::benchmarks
