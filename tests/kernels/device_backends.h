// The backends for GPUs, for the tests of test_backends.h.
#pragma once

#include "tests/kernels/test_backends.h"

namespace ballast::kernels {

// What the threads of CUDA's walks do, one thread after the other on the CPU: the same source, without CUDA.
void on_octets(const BackendTest& test);

// On the first GPU, in its memory; for cases tagged [gpu].
void on_cuda(const BackendTest& test);

}  // namespace ballast::kernels
