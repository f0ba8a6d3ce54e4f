#include "zero/comm/shared_memory.h"

#include <catch2/catch.hpp>

#include "tests/offload/descriptors.h"

using namespace ballast;
using Catch::Contains;

TEST_CASE("bytes written through one mapping of shared memory are read through the other") {
  constexpr std::size_t bytes = 10000;
  const std::size_t descriptors = offload::open_descriptors();
  {
    SharedMemory made = SharedMemory::make(bytes, "buffers");
    const SharedMemory opened = SharedMemory::open(made.invitation());
    made.close_file();
    CHECK(opened.data() != made.data());
    CHECK(opened.data()[bytes - 1] == std::byte{0});
    made.data()[bytes - 1] = std::byte{7};
    CHECK(opened.data()[bytes - 1] == std::byte{7});
    CHECK(offload::open_descriptors() == descriptors);
  }
}

TEST_CASE("opening shared memory that cannot be reached fails with the reason") {
  SharedMemory made = SharedMemory::make(100, "buffers");
  const std::string invitation = made.invitation();
  CHECK_THROWS_WITH(SharedMemory::open("x" + invitation),
                    Contains("B2301") && Contains("not all ranks are on one machine"));
  made.close_file();
  CHECK_THROWS_WITH(SharedMemory::open(invitation), Contains("B2301") && Contains("cannot share the memory"));
}
