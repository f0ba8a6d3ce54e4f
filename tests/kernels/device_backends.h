// The backends for GPUs, for the tests of test_backends.h.
#pragma once

#include "tests/kernels/test_backends.h"

namespace ballast::kernels {

// Runs the work of the threads of CUDA's walks on the CPU, one thread after the other: the same source, without CUDA.
void on_octets(const BackendTest& test);

// Runs on the first GPU, in its memory. For cases tagged [gpu].
void on_cuda(const BackendTest& test);
bool is_emulated();  // whether that is an emulated one (tests/emulated_cuda)

}  // namespace ballast::kernels
