#include "kernels/runtime/stream.h"

#include <catch2/catch.hpp>
#include <cstring>

#include "kernels/runtime/buffer.h"
#include "tests/mebibyte.h"
#include "tests/skip.h"

using namespace ballast;

namespace {

Buffer make(MemoryAccounts& accounts, MemoryKind kind, std::size_t bytes) {
  return allocate(accounts, {.kind = kind, .bytes = bytes, .owner = "test"});
}

}  // namespace

TEST_CASE("without a GPU, making streams and events fails with the reason") {
  if (!device::list().empty()) {
    return skip("this machine has a GPU");
  }
  CHECK_FALSE(device::absence().empty());
  CHECK_THROWS_AS(Stream(), ResourceError);
  CHECK_THROWS_AS(Event(), ResourceError);
  CHECK_THROWS_AS(Stream::wrap(nullptr), ResourceError);
  CHECK_THROWS_WITH(Stream(), Catch::Contains("B2101") || Catch::Contains("B2102"));
}

TEST_CASE("a GPU that does not exist is refused", "[gpu]") {
  const auto gpus = static_cast<int>(device::list().size());
  CHECK_THROWS_WITH(Stream(gpus), Catch::Contains("B2102"));
  CHECK_THROWS_WITH(Stream(-1), Catch::Contains("B2102"));
}

TEST_CASE("bytes are copied to the GPU, between its buffers, and back", "[gpu]") {
  MemoryAccounts accounts;
  const Stream stream;
  const std::size_t bytes = 5 * mebibyte + 3;
  const Buffer from = make(accounts, MemoryKind::pinned, bytes);
  const Buffer first = make(accounts, MemoryKind::device, bytes);
  const Buffer second = make(accounts, MemoryKind::device, bytes);
  const Buffer back = make(accounts, MemoryKind::pinned, bytes);
  CHECK(from.pinned());
  CHECK(from.unpinned_because().empty());
  for (std::size_t i = 0; i < bytes; ++i) {
    from.data()[i] = static_cast<std::byte>(i % 251);
  }
  copy(first.data(), from.data(), bytes, stream);
  copy(second.data(), first.data(), bytes, stream);
  copy(back.data(), second.data(), bytes, stream);
  stream.synchronize();
  CHECK(std::memcmp(from.data(), back.data(), bytes) == 0);
}

TEST_CASE("an event orders two streams", "[gpu]") {
  MemoryAccounts accounts;
  const Stream writer;
  const Stream reader;
  const Event start(0, Event::Timing::on);
  const Event written(0, Event::Timing::on);
  const Buffer memory = make(accounts, MemoryKind::device, 64 * mebibyte);
  const Buffer host = make(accounts, MemoryKind::pinned, 64 * mebibyte);
  CHECK(written.is_done());
  for (unsigned char value = 1; value <= 20; ++value) {
    start.record(writer);
    fill(memory.data(), value, memory.bytes(), writer);
    written.record(writer);
    reader.wait_for(written);
    copy(host.data(), memory.data(), host.bytes(), reader);
    reader.synchronize();
    CHECK(host.data()[host.bytes() - 1] == std::byte{value});
  }
  CHECK(written.seconds_since(start) > 0);
}

TEST_CASE("a wrapped stream is not destroyed with its wrapper", "[gpu]") {
  const Stream owner;
  { const Stream wrapped = Stream::wrap(owner.handle()); }
  Event().record(owner);
  owner.synchronize();
  const Stream moved = Stream::wrap(nullptr);  // the default stream
  moved.synchronize();
}

TEST_CASE("a buffer may be freed while the GPU writes to it", "[gpu]") {
  MemoryAccounts accounts;
  const Stream stream;
  for (int round = 0; round < 10; ++round) {
    const Buffer memory = make(accounts, MemoryKind::device, 64 * mebibyte);
    const Buffer host = make(accounts, MemoryKind::pinned, 64 * mebibyte);
    fill(memory.data(), 1, memory.bytes(), stream);
    copy(host.data(), memory.data(), host.bytes(), stream);
  }
  CHECK_NOTHROW(stream.synchronize());
  CHECK(accounts.total(MemoryKind::device).now == 0);
}

TEST_CASE("too little GPU memory is an error with both figures, and later allocations succeed", "[gpu]") {
  MemoryAccounts accounts;
  CHECK_THROWS_WITH(make(accounts, MemoryKind::device, std::size_t{1} << 50),
                    Catch::Contains("B2003") && Catch::Contains("1 PiB") && Catch::Contains("available"));
  CHECK(accounts.total(MemoryKind::device).now == 0);
  CHECK_NOTHROW(make(accounts, MemoryKind::device, 3));
}

TEST_CASE("GPU memory is free again after its buffer ends", "[gpu]") {
  MemoryAccounts accounts;
  make(accounts, MemoryKind::device, mebibyte);
  const std::size_t before = device::available_bytes(0);
  for (int round = 0; round < 100; ++round) {
    make(accounts, MemoryKind::device, 256 * mebibyte);
  }
  CHECK(device::available_bytes(0) + 64 * mebibyte >= before);
}

TEST_CASE("the GPUs are described", "[gpu]") {
  for (const Gpu& gpu : device::list()) {
    CHECK_FALSE(gpu.name.empty());
    CHECK(gpu.memory_bytes > mebibyte);
    CHECK(gpu.major >= 7);
  }
  CHECK(device::absence().empty());
}
