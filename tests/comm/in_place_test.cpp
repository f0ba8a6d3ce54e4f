// Tests of collectives that read shared memory in place.
#include <ballast/error.h>

#include <catch2/catch.hpp>
#include <cstring>

#include "kernels/runtime/buffer.h"
#include "tests/comm/process_groups.h"
#include "tests/comm/rank_values.h"
#include "tests/comm/test_groups.h"
#include "tests/offload/descriptors.h"
#include "tests/sanitizer.h"
#include "zero/comm/shared_memory.h"

using namespace ballast;
using namespace ballast::testing;
using Catch::Contains;

namespace {

constexpr std::size_t in_many_pieces = sanitized ? 600'003 : 1'000'003;

// Values in memory that the other ranks read in place.
class SharedValues {
 public:
  SharedValues(Communicator& ranks, DType dtype, std::size_t count)
      : memory_(allocate(accounts_,
                         {.bytes = count * byte_size(dtype), .owner = "values", .allocator = ranks.shared_memory()})),
        dtype_(dtype) {}

  View view() const { return memory_.view(dtype_); }
  void put(std::size_t first, const Values& values) {
    std::memcpy(view().part(first, values.view().count()).data(), values.view().data(), values.view().bytes());
  }
  bool equal(const Values& values) const {
    return std::memcmp(view().data(), values.view().data(), values.view().bytes()) == 0;
  }

 private:
  MemoryAccounts accounts_;
  Buffer memory_;
  DType dtype_;
};

void gathers(Communicator& ranks, std::size_t count) {
  SharedValues all(ranks, DType::bf16, ranks.size() * count);
  for (std::size_t turn = 0; turn < 2; ++turn) {
    Values expected(DType::bf16, ranks.size() * count);
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      expected.put(rank * count, Values::of_rank(rank + turn, DType::bf16, count));
    }
    const Values mine = Values::of_rank(ranks.rank() + turn, DType::bf16, count);
    ranks.all_gather(mine.view(), all.view());  // the others may still read the last turn's, if a gather ends too soon
    expect(all.equal(expected), "an all_gather into shared memory");
  }
}

void reduces(Communicator& ranks, std::size_t count) {
  SharedValues all(ranks, DType::bf16, ranks.size() * count);
  for (std::size_t turn = 0; turn < 2; ++turn) {
    all.put(0, Values::of_rank(ranks.rank(), DType::bf16, ranks.size() * count));
    Values part = overwritten(count);
    ranks.reduce_scatter(all.view(), part.view());
    std::memset(all.view().data(), 0xff, all.view().bytes());  // free to be changed, now
    expect(part == summed(ranks.size(), DType::bf16, ranks.rank() * count, count), "a reduce_scatter of shared memory");

    all.put(0, Values::of_rank(ranks.rank(), DType::bf16, ranks.size() * count));
    Values whole = overwritten(count);
    ranks.all_reduce(all.view().part(0, count), whole.view());
    std::memset(all.view().data(), 0xff, all.view().bytes());
    expect(whole == summed(ranks.size(), DType::bf16, 0, count), "an all_reduce of shared memory");

    all.put(0, Values::of_rank(ranks.rank(), DType::bf16, ranks.size() * count));
    SharedValues sum(ranks, DType::fp32, count);
    ranks.all_reduce(all.view().part(0, count), sum.view());
    expect(sum.equal(summed(ranks.size(), DType::bf16, 0, count)), "an all_reduce within shared memory");

    all.put(0, Values::of_rank(ranks.rank(), DType::bf16, ranks.size() * count));
    SharedValues rounded(ranks, DType::bf16, count);
    ranks.all_reduce(all.view().part(0, count), rounded.view());
    expect(rounded.equal(summed_and_rounded(ranks.size(), DType::bf16, 0, count, DType::bf16)),
           "a rounded all_reduce within shared memory");
  }
}

void broadcasts(Communicator& ranks, std::size_t count) {
  SharedValues values(ranks, DType::fp32, count);
  for (std::size_t root = 0; root < ranks.size(); ++root) {
    values.put(0, Values::of_rank(ranks.rank(), DType::fp32, count));
    ranks.broadcast(values.view(), root);
    expect(values.equal(Values::of_rank(root, DType::fp32, count)), "a broadcast of shared memory");
  }
}

}  // namespace

TEST_CASE("collectives in shared memory give the same bits, and it may change once a call returns") {
  for (std::size_t size = 2; size <= (sanitized ? 3 : 4); ++size) {
    on_all_groups(size, [](Communicator& ranks) {
      if (ranks.shared_memory() == nullptr) return;
      const auto part = ranks.split(0);
      for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, in_many_pieces / ranks.size()}) {
        for (Communicator* group : {&ranks, part.get()}) {  // each time in other memory
          gathers(*group, count);
          reduces(*group, count);
          broadcasts(*group, count);
        }
      }
    });
  }
}

TEST_CASE("processes of one machine share memory, and a rank whose memory differs in kind is named") {
  const auto run = [](const RankBody& body) {
    const ProcessGroupRig rig(2, HostTransport::shared_memory, patient);
    return Processes(2, [&](std::size_t rank) { rig.as_rank(rank, body); }).failures();
  };
  const Failures failures = run([](Communicator& ranks) {
    expect(ranks.shared_memory() != nullptr, "shared memory");
    SharedValues shared(ranks, DType::bf16, in_many_pieces);
    Values own(DType::bf16, in_many_pieces);
    Values sum(DType::fp32, in_many_pieces);
    ranks.all_reduce(ranks.rank() == 0 ? shared.view() : own.view(), sum.view());
  });
  for (const std::string& failure : failures) {
    CHECK_THAT(failure, (Contains("rank 1") && Contains("gives a collective private memory")) ||
                            (Contains("rank 0") && Contains("gives a collective shared memory")));
    CHECK_THAT(failure, Contains("Communicator::shared_memory()"));
  }
}

TEST_CASE("a process locates its shared pages, and its peer reads their current bytes") {
  const std::size_t descriptors = offload::open_descriptors();
  {
    const SharedMemory local = SharedMemory::make(1, "local");
    const SharedMemory peer = SharedMemory::open(local.invitation(), 1);
    SharedPages pages;
    PeerPages seen;
    constexpr std::size_t bytes = 3 << 20;
    std::vector<int> files;
    for (const std::byte value : {std::byte{1}, std::byte{2}}) {
      std::byte* const memory = pages.allocate(bytes);
      memory[bytes - 1] = value;
      const auto place = pages.find({memory + bytes - 10, 10});
      REQUIRE(place.has_value());
      CHECK(seen.at(*place, 10, peer)[9] == value);
      CHECK_THROWS_WITH(seen.at(*place, 11, peer), Contains("beyond the end"));
      CHECK(!pages.find({memory + bytes - 10, 11}));
      CHECK(!pages.find({memory - 1, 2}));
      CHECK(!pages.find({memory, std::size_t{0}}));
      files.push_back(place->file);
      const std::byte* const looked_at = seen.at(*place, 10, peer);
      pages.release(memory, bytes);
      CHECK(!pages.find({memory, 1}));
      CHECK(looked_at[9] == std::byte{0});  // the pages are gone, though they are still mapped here
    }
    CHECK(files[0] == files[1]);  // the descriptor alone would have led to the released memory
  }
  CHECK(offload::open_descriptors() == descriptors);
}
