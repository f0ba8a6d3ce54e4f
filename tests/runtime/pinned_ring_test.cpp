#include "kernels/runtime/pinned_ring.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>

using namespace ballast;

TEST_CASE("a ring gives its slots in turn") {
  MemoryAccounts accounts;
  PinnedRing ring(accounts, "staging", {.slots = 3, .slot_bytes = 4096});
  CHECK(accounts.usage(MemoryKind::pinned, "staging").now == 3 * 4096);
  const std::byte* const first = ring.buffer().data();
  for (const std::size_t slot : std::initializer_list<std::size_t>{0, 1, 2, 0, 1}) {
    const std::span<std::byte> bytes = ring.next();
    CHECK(bytes.data() == first + slot * 4096);
    CHECK(bytes.size() == 4096);
    std::fill(bytes.begin(), bytes.end(), std::byte{1});
  }
}

TEST_CASE("a ring needs slots") {
  MemoryAccounts accounts;
  CHECK_THROWS_AS(PinnedRing(accounts, "staging", {.slots = 0, .slot_bytes = 4096}), UsageError);
  CHECK_THROWS_AS(PinnedRing(accounts, "staging", {.slots = 2, .slot_bytes = 0}), UsageError);
  CHECK_THROWS_AS(PinnedRing(accounts, "staging", {.slots = 4, .slot_bytes = SIZE_MAX / 4 + 1}), UsageError);
}

TEST_CASE("a ring carries pageable memory to the GPU without overwriting what is under way", "[gpu]") {
  MemoryAccounts accounts;
  constexpr std::size_t slot = 1 << 20;
  constexpr std::size_t bytes = 64 * slot;
  PinnedRing ring(accounts, "staging", {.slots = 2, .slot_bytes = slot});
  REQUIRE(ring.buffer().pinned());
  const Stream stream;
  const Buffer from = allocate(accounts, {.bytes = bytes, .owner = "from"});
  const Buffer memory = allocate(accounts, {.kind = MemoryKind::device, .bytes = bytes, .owner = "memory"});
  const Buffer back = allocate(accounts, {.kind = MemoryKind::pinned, .bytes = bytes, .owner = "back"});
  for (std::size_t offset = 0; offset < bytes; offset += slot) {
    std::memset(from.data() + offset, static_cast<int>(offset / slot), slot);
    const std::span<std::byte> staged = ring.next();
    std::memcpy(staged.data(), from.data() + offset, slot);
    copy(memory.data() + offset, staged.data(), slot, stream);
    ring.in_use_by(stream);
  }
  copy(back.data(), memory.data(), bytes, stream);
  stream.synchronize();
  CHECK(std::memcmp(from.data(), back.data(), bytes) == 0);
}
