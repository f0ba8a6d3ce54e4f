// NCCL and cuBLAS as shared libraries, which may be missing.
#include <catch2/catch.hpp>

#include "kernels/cublas.h"
#include "zero/comm/nccl_library.h"

using ballast::load_nccl;
using ballast::kernels::load_cublas;
using Catch::Contains;

TEST_CASE("a library that is not there, or is not NCCL, is refused") {
  CHECK_THROWS_WITH(load_nccl("libnccl-that-is-not-there.so.2"),
                    Contains("B2301") && Contains("cannot open shared object file") && Contains("nvidia-nccl"));
  CHECK_THROWS_WITH(load_nccl("libm.so.6"), Contains("B2301") && Contains("libm.so.6") && Contains("ncclGetUniqueId"));
}

TEST_CASE("a library that is not there, or is not cuBLAS, is refused") {
  CHECK_THROWS_WITH(load_cublas("libcublas-that-is-not-there.so.13"),
                    Contains("B2103") && Contains("cannot open shared object file"));
  CHECK_THROWS_WITH(load_cublas("libm.so.6"), Contains("B2103") && Contains("libm.so.6") && Contains("cublasCreate"));
}
