#include "zero/comm/shared_memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <fstream>

#include "tests/offload/descriptors.h"
#include "tests/skip.h"
#include "tests/temporary_directory.h"
#include "zero/comm/message.h"

using namespace ballast;
using Catch::Contains;

TEST_CASE("bytes written through one mapping of shared memory are read through the other") {
  constexpr std::size_t bytes = 10000;
  const std::size_t descriptors = offload::open_descriptors();
  {
    SharedMemory made = SharedMemory::make(bytes, "buffers");
    const SharedMemory opened = SharedMemory::open(made.invitation(), bytes);
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
  CHECK_THROWS_WITH(SharedMemory::open("x" + invitation, 100),
                    Contains("B2301") && Contains("not all ranks are on one machine"));
  made.close_file();
  CHECK_THROWS_WITH(SharedMemory::open(invitation, 100), Contains("B2301") && Contains("cannot share the memory"));
}

TEST_CASE("memory that no rank has made for others is not mapped") {
  const auto open = [](int file, std::size_t bytes) {
    SharedMemory::open(fmt::format("{} {} {}", this_machine(), ::getpid(), file), bytes);
  };
  const SharedMemory genuine = SharedMemory::make(100, "buffers");
  open(genuine.file(), 100);
  CHECK_THROWS_WITH(open(genuine.file(), 101), Contains("B2301") && Contains("100 bytes instead of 101"));
  const Descriptor unsealed(::memfd_create("mine", MFD_CLOEXEC));
  REQUIRE(::ftruncate(unsealed.get(), 100) == 0);
  CHECK_THROWS_WITH(open(unsealed.get(), 100), Contains("B2301") && Contains("no shared memory of Ballast"));
  const TemporaryDirectory folder;
  std::ofstream(folder.path() / "file") << std::string(100, 'x');
  const Descriptor file(::open((folder.path() / "file").c_str(), O_RDWR | O_CLOEXEC));
  CHECK_THROWS_WITH(open(file.get(), 100), Contains("B2301") && Contains("no shared memory of Ballast"));
  if (::geteuid() != 0) return skip("giving memory to another user needs root");
  REQUIRE(::fchown(genuine.file(), 1234, 1234) == 0);
  CHECK_THROWS_WITH(open(genuine.file(), 100), Contains("B2301") && Contains("belongs to user 1234"));
}

// The kernel does so for all memory with vm.memfd_noexec.
TEST_CASE("memory to which the kernel adds a seal is mapped") {
  constexpr unsigned no_exec_seal = 0x8;  // MFD_NOEXEC_SEAL
  constexpr int ours = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  const Descriptor sealed(::memfd_create("sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING | no_exec_seal));
  if (!sealed) return skip("this kernel has no seal against execution");
  REQUIRE(::ftruncate(sealed.get(), 100) == 0);
  REQUIRE(::fcntl(sealed.get(), F_ADD_SEALS, ours) == 0);
  REQUIRE(::fcntl(sealed.get(), F_GET_SEALS) != ours);
  const std::string invitation = fmt::format("{} {} {}", this_machine(), ::getpid(), sealed.get());
  CHECK(SharedMemory::open(invitation, 100).bytes() == 100);
  const SharedMemory made = SharedMemory::make(100, "buffers");
  CHECK(::fcntl(made.file(), F_GET_SEALS) == ::fcntl(sealed.get(), F_GET_SEALS));  // it is never executed either
}

TEST_CASE("the size of shared memory stays: no process can take pages away under another") {
  const SharedMemory made = SharedMemory::make(8192, "buffers");
  CHECK(::ftruncate(made.file(), 4096) != 0);
  CHECK(::ftruncate(made.file(), 16384) != 0);
}
