// DeepSpeed's async_io in a process of its own, see deepspeed_aio.py.
#pragma once

#include "benchmarks/offload/contest.h"
#include "benchmarks/offload/tensor_files.h"

namespace ballast::benchmarks {

Sample run_deepspeed(const std::string& program, const TensorFiles& files);

}  // namespace ballast::benchmarks
