#include <ballast/error.h>

#include "offload/io_queue.h"

#include <catch2/catch.hpp>
#include <cerrno>

#include "tests/temporary_directory.h"

using namespace ballast;
using namespace ballast::offload;
using Next = Transfer::Next;

namespace {

struct TransferRig {
  explicit TransferRig(bool direct = false) : file(directory.path() / "file", {.create = true, .direct = direct}) {}

  Transfer transfer(IoKind kind = IoKind::read) {
    return Transfer({kind, &file, 100, kind == IoKind::flush ? std::span<std::byte>{} : std::span(memory)});
  }

  TemporaryDirectory directory;
  File file;
  std::array<std::byte, 3 * block_bytes> memory{};
};

}  // namespace

TEST_CASE("a transfer of all bytes at once, or of none, is finished") {
  TransferRig rig;
  CHECK(rig.transfer().take(3 * block_bytes) == Next::finished);
  CHECK(rig.transfer(IoKind::flush).take(0) == Next::finished);
}

TEST_CASE("after a short transfer the rest is requested") {
  TransferRig rig;
  Transfer transfer = rig.transfer();
  CHECK(transfer.take(1000) == Next::again);
  CHECK(transfer.rest().offset == 1100);
  CHECK(transfer.rest().memory.data() == rig.memory.data() + 1000);
  CHECK(transfer.rest().memory.size() == 3 * block_bytes - 1000);
  CHECK(transfer.take(3 * block_bytes - 1000) == Next::finished);
}

TEST_CASE("direct I/O continues at a whole block") {
  TransferRig rig(true);
  if (!rig.file.direct()) return;
  Transfer transfer = rig.transfer();
  CHECK(transfer.take(block_bytes + 1000) == Next::again);
  CHECK(transfer.rest().memory.size() == 2 * block_bytes);
  CHECK(transfer.take(2 * block_bytes) == Next::finished);
}

TEST_CASE("an interrupted call is always repeated, a refused one at most 100 times") {
  TransferRig rig;
  Transfer transfer = rig.transfer();
  for (int i = 0; i < 1000; ++i) {
    REQUIRE(transfer.take(-EINTR) == Next::again);
  }
  CHECK_FALSE(transfer.refused());
  CHECK(transfer.take(-EAGAIN) == Next::again);
  CHECK(transfer.refused());
  CHECK(transfer.take(10) == Next::again);
  CHECK_FALSE(transfer.refused());
  int tries = 1;
  while (transfer.take(-EAGAIN) == Next::again) {
    ++tries;
  }
  CHECK(tries == 100);
  CHECK_THROWS_WITH(std::rethrow_exception(transfer.error()), Catch::Contains("B3201"));
}

TEST_CASE("an error names operation, file, offset and cause") {
  TransferRig rig;
  Transfer transfer = rig.transfer(IoKind::write);
  CHECK(transfer.take(1000) == Next::again);
  CHECK(transfer.take(-EIO) == Next::failed);
  CHECK_THROWS_WITH(std::rethrow_exception(transfer.error()),
                    Catch::Contains("B3201") && Catch::Contains("write failed: Input/output error") &&
                        Catch::Contains(rig.file.path().string() + ", byte 1100"));
}

TEST_CASE("a full drive has its own error code, and the end of a file is an error") {
  TransferRig rig;
  Transfer full = rig.transfer(IoKind::write);
  CHECK(full.take(-ENOSPC) == Next::failed);
  CHECK_THROWS_WITH(std::rethrow_exception(full.error()), Catch::Contains("B2202"));
  Transfer ended = rig.transfer();
  CHECK(ended.take(0) == Next::failed);
  CHECK_THROWS_WITH(std::rethrow_exception(ended.error()), Catch::Contains("No data available"));
}
