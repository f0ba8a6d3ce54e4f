#include <catch2/catch.hpp>

#include "zero/comm/nccl_library.h"

using ballast::load_nccl;
using Catch::Contains;

TEST_CASE("a library that is not there, or is not NCCL, is refused") {
  CHECK_THROWS_WITH(load_nccl("libnccl-that-is-not-there.so.2"),
                    Contains("B2301") && Contains("cannot open shared object file") && Contains("nvidia-nccl"));
  CHECK_THROWS_WITH(load_nccl("libm.so.6"), Contains("B2301") && Contains("libm.so.6") && Contains("ncclGetUniqueId"));
}
