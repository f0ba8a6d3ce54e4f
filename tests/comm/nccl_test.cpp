// NCCL gives the same bits as every other communicator. Ranks are threads, each with a GPU of its own, as NCCL
// requires.
#include <ballast/error.h>

#include <catch2/catch.hpp>
#include <functional>
#include <thread>

#include "kernels/reduction_memory.h"
#include "kernels/runtime/buffer.h"
#include "kernels/runtime/stream.h"
#include "tests/comm/encoded_reference.h"
#include "tests/comm/process_groups.h"
#include "tests/comm/rank_values.h"
#include "tests/skip.h"
#include "zero/comm/call.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

// Copies values to a GPU and back.
class OnGpu {
 public:
  OnGpu(Values values, const Stream& stream, MemoryAccounts& accounts)
      : values_(std::move(values)),
        stream_(stream),
        memory_(allocate(
            accounts,
            {.kind = MemoryKind::device, .bytes = values_.view().bytes(), .owner = "test", .gpu = stream.gpu()})) {
    copy(memory_.data(), values_.view().data(), memory_.bytes(), stream_);
  }

  View view() const { return memory_.view(values_.view().dtype()); }
  const Values& back() {
    copy(values_.view().data(), memory_.data(), memory_.bytes(), stream_);
    stream_.synchronize();
    return values_;
  }

 private:
  Values values_;
  const Stream& stream_;
  Buffer memory_;
};

void everything(Communicator& ranks, const Stream& stream, MemoryAccounts& accounts, std::size_t ranks_per_host = 1) {
  constexpr std::size_t count = 99991;
  const Summands summands(ranks.size(), ranks_per_host);
  for (const DType dtype : float_dtypes) {
    OnGpu all(Values::of_rank(ranks.rank(), dtype, ranks.size() * count), stream, accounts);
    OnGpu part(overwritten(count), stream, accounts);
    ranks.reduce_scatter(all.view(), part.view());
    expect(part.back() == summed(summands, dtype, ranks.rank() * count, count), "reduce_scatter");

    OnGpu whole(overwritten(count), stream, accounts);
    ranks.all_reduce(all.view().part(0, count), whole.view());
    expect(whole.back() == summed(summands, dtype, 0, count), "all_reduce");

    OnGpu few(overwritten(1000), stream, accounts);
    ranks.all_reduce(all.view().part(0, 1000), few.view());
    expect(few.back() == summed(summands, dtype, 0, 1000), "all_reduce of few elements");

    OnGpu mine(Values::of_rank(ranks.rank(), dtype, count), stream, accounts);
    Values expected(dtype, ranks.size() * count);
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      expected.put(rank * count, Values::of_rank(rank, dtype, count));
    }
    ranks.all_gather(mine.view(), all.view());
    expect(all.back() == expected, "all_gather");
    ranks.broadcast(all.view().part(0, count), 0);
  }
  // Each rank sends as many values more to a rank as that one is higher, and none to itself.
  OnGpu sent(Values::of_rank(ranks.rank(), DType::bf16, count), stream, accounts);
  std::vector<std::unique_ptr<OnGpu>> received;
  std::vector<SentPart> to;
  std::vector<ReceivedPart> from;
  for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
    received.push_back(std::make_unique<OnGpu>(overwritten(1000 * ranks.rank() + 7, DType::bf16), stream, accounts));
    if (peer != ranks.rank()) to.push_back({peer, sent.view().part(peer, 1000 * peer + 7)});
    if (peer != ranks.rank()) from.push_back({peer, received[peer]->view()});
  }
  ranks.exchange(to, from);
  for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
    if (peer == ranks.rank()) continue;
    const Values theirs = Values::of_rank(peer, DType::bf16, count);
    const ConstView expected = theirs.view().part(ranks.rank(), 1000 * ranks.rank() + 7);
    expect(std::ranges::equal(received[peer]->back().view().as_bytes(), expected.as_bytes()), "exchange");
  }
}

void everything_encoded(Communicator& ranks, const Stream& stream, MemoryAccounts& accounts,
                        std::size_t ranks_per_host = 1) {
  constexpr std::size_t count = 99991;
  const Summands summands(ranks.size(), ranks_per_host);
  Encoding encoding{.values = CodeBits::eight, .sums = CodeBits::four, .stream = wire_stream, .memory = {}};
  const Buffer codes = allocate(accounts, {.kind = MemoryKind::device,
                                           .bytes = kernels::encoded_parts_bytes(count, ranks.size(), CodeBits::eight),
                                           .owner = "codes",
                                           .gpu = stream.gpu()});
  encoding.memory = {codes.data(), codes.bytes(), DType::u8};
  OnGpu all(Values::of_rank(ranks.rank(), DType::bf16, ranks.size() * count), stream, accounts);
  OnGpu part(overwritten(count), stream, accounts);
  ranks.reduce_scatter(all.view(), part.view(), encoding);
  expect(part.back() == scattered_codes(summands, DType::bf16, count, ranks.rank(), DType::fp32, encoding),
         "encoded reduce_scatter");
  OnGpu whole(overwritten(count, DType::bf16), stream, accounts);
  ranks.all_reduce(all.view().part(0, count), whole.view(), encoding);
  expect(whole.back() == reduced_codes(summands, DType::bf16, count, DType::bf16, encoding), "encoded all_reduce");
  OnGpu mine(Values::of_rank(ranks.rank(), DType::bf16, count), stream, accounts);
  ranks.all_gather(mine.view(), all.view(), encoding);
  expect(all.back() == gathered_codes(ranks.size(), DType::bf16, count, CodeBits::eight), "encoded all_gather");
}

using GpuOfRank = std::function<int(std::size_t rank)>;
using Test = std::function<void(Communicator& ranks, const Stream& stream, const Channel& channel,
                                const MemoryAccounts& of_groups)>;

// Connects threads as ranks in host memory, and runs the test on each. Returns their errors.
Failures failures_on_gpus(GroupShape shape, const GpuOfRank& gpu_of, const Test& test) {
  const TemporaryDirectory folder;
  Failures failures(shape.size);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < shape.size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        FileStore store(folder.path());
        const Stream stream(gpu_of(rank));
        const auto on_host = kernels::cpu_backend({.threads = 1});
        const auto backend = kernels::cuda_backend(stream.handle(), stream.gpu());
        MemoryAccounts accounts;
        const auto ranks = connect({.launch = Launch{.rank = rank, .size = shape.size},
                                    .store = &store,
                                    .timeout = patient,
                                    .ranks_per_host = shape.ranks_per_host},
                                   {.backend = *on_host, .accounts = accounts});
        test(*ranks, stream, Channel{{stream.handle(), stream.gpu()}, backend.get()}, accounts);
      } catch (const std::exception& failure) {
        failures[rank] = failure.what();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return failures;
}

void check_on_gpus(GroupShape shape, const GpuOfRank& gpu_of, const Test& test) {
  const Failures failures = failures_on_gpus(shape, gpu_of, test);
  if (failures[0].find("no NCCL") != std::string::npos) return skip("this build has no NCCL");
  CHECK(failures == Failures(shape.size));
}

}  // namespace

TEST_CASE("NCCL gives the same bits as every other communicator", "[gpu]") {
  const std::size_t gpus = device::list().size();
  if (gpus < 2) return skip("NCCL gives each rank a GPU of its own, and there is one");
  for (const std::size_t size : {2u, 3u}) {
    if (size > gpus) break;
    check_on_gpus(
        size, [](std::size_t rank) { return static_cast<int>(rank); },
        [](Communicator& ranks, const Stream& stream, const Channel& channel, const MemoryAccounts&) {
          MemoryAccounts accounts;
          const auto on_gpus = ranks.split(0, &channel);
          everything(*on_gpus, stream, accounts);
          everything_encoded(*on_gpus, stream, accounts);
          everything(*on_gpus->split(ranks.rank() % 2), stream, accounts);
        });
  }
}

TEST_CASE("NCCL adds the ranks of each host first, and then the hosts", "[gpu]") {
  if (device::list().size() < 4) return skip("NCCL gives each rank a GPU of its own, and there are fewer than 4");
  check_on_gpus(
      {4, 2}, [](std::size_t rank) { return static_cast<int>(rank); },
      [](Communicator& ranks, const Stream& stream, const Channel& channel, const MemoryAccounts&) {
        MemoryAccounts accounts;
        const auto on_gpus = ranks.split(0, &channel);
        everything(*on_gpus, stream, accounts, 2);
        everything_encoded(*on_gpus, stream, accounts, 2);
        everything(*on_gpus->split(ranks.rank() % 2), stream, accounts);
      });
}

TEST_CASE("a group of GPUs that gathers codes takes no device memory but theirs", "[gpu]") {
  if (device::list().size() < 2) return skip("NCCL gives each rank a GPU of its own, and there is one");
  check_on_gpus(
      2, [](std::size_t rank) { return static_cast<int>(rank); },
      [](Communicator& ranks, const Stream& stream, const Channel& channel, const MemoryAccounts& of_groups) {
        constexpr std::size_t count = 1000;
        MemoryAccounts accounts;
        const auto on_gpus = ranks.split(0, &channel);
        const std::size_t bytes = kernels::encoded_parts_bytes(count, 2, CodeBits::eight);
        const Buffer codes =
            allocate(accounts, {.kind = MemoryKind::device, .bytes = bytes, .owner = "codes", .gpu = stream.gpu()});
        const OnGpu mine(Values::of_rank(ranks.rank(), DType::bf16, count), stream, accounts);
        const OnGpu all(Values(DType::bf16, 2 * count), stream, accounts);
        on_gpus->all_gather(mine.view(), all.view(), {.memory = {codes.data(), bytes, DType::u8}});
        stream.synchronize();
        for (const MemoryAccounts::Entry& entry : of_groups.entries()) {
          expect(entry.kind != MemoryKind::device, "device memory of the group: " + entry.owner);
        }
      });
}

namespace {

// The most bytes that one of the groups has reserved for such things.
std::size_t most_of(const MemoryAccounts& of_groups, std::string_view owner) {
  std::size_t most = 0;
  for (const MemoryAccounts::Entry& entry : of_groups.entries()) {
    if (entry.kind == MemoryKind::device && entry.owner.starts_with(owner)) most = std::max(most, entry.usage.now);
  }
  return most;
}

// Each case has a group of its own, which reserves memory when it needs some.
void check_memory(Communicator& ranks, const Stream& stream, const Channel& channel, const MemoryAccounts& of_groups,
                  std::size_t ranks_per_host) {
  const kernels::ReducingRanks shape{ranks.size(), ranks_per_host};
  const auto expect_memory = [&](const char* what, const kernels::ReductionMemory& memory,
                                 const std::function<void(Communicator&)>& reduce) {
    const auto group = ranks.split(0, &channel);
    reduce(*group);
    stream.synchronize();
    expect(most_of(of_groups, "nccl, group ") == memory.received, std::string("memory for values of ") + what);
    expect(most_of(of_groups, "sums, group ") == memory.sums, std::string("memory for sums of ") + what);
  };
  MemoryAccounts accounts;
  for (const std::size_t count : {std::size_t{128}, std::size_t{1003}, std::size_t{99991}}) {
    for (const DType dtype : {DType::fp32, DType::bf16}) {
      const OnGpu all(Values::of_rank(ranks.rank(), dtype, ranks.size() * count), stream, accounts);
      const OnGpu part(overwritten(count), stream, accounts);
      const std::size_t width = byte_size(dtype);
      expect_memory("a reduce_scatter", kernels::memory_of_scatter(shape, count, width),
                    [&](Communicator& group) { group.reduce_scatter(all.view(), part.view()); });
      expect_memory("an all_reduce", kernels::memory_of_sum(shape, count, width),
                    [&](Communicator& group) { group.all_reduce(all.view().part(0, count), part.view()); });
      Encoding encoding{.values = CodeBits::eight, .sums = CodeBits::four, .stream = wire_stream, .memory = {}};
      const std::size_t bytes = kernels::encoded_parts_bytes(count, ranks.size(), CodeBits::eight);
      const Buffer codes =
          allocate(accounts, {.kind = MemoryKind::device, .bytes = bytes, .owner = "codes", .gpu = stream.gpu()});
      encoding.memory = codes.view(DType::u8);
      expect_memory("an encoded reduce_scatter",
                    kernels::memory_of_codes(shape, count, CodeBits::eight, CodeBits::four),
                    [&](Communicator& group) { group.reduce_scatter(all.view(), part.view(), encoding); });
      const std::size_t of_rank = kernels::part_of_groups(count, ranks.size());
      expect_memory("an encoded all_reduce", kernels::memory_of_codes(shape, of_rank, CodeBits::eight, CodeBits::four),
                    [&](Communicator& group) { group.all_reduce(all.view().part(0, count), part.view(), encoding); });
    }
  }
}

}  // namespace

TEST_CASE("a group of GPUs reserves for a reduction what plans count", "[gpu]") {
  const std::size_t gpus = device::list().size();
  if (gpus < 2) return skip("NCCL gives each rank a GPU of its own, and there is one");
  for (const GroupShape shape : {GroupShape(2), GroupShape(3), GroupShape(4, 2)}) {
    if (shape.size > gpus) break;
    check_on_gpus(
        shape, [](std::size_t rank) { return static_cast<int>(rank); },
        [&](Communicator& ranks, const Stream& stream, const Channel& channel, const MemoryAccounts& of_groups) {
          check_memory(ranks, stream, channel, of_groups, shape.ranks_per_host);
        });
  }
}

TEST_CASE("one exchange of a reduction takes 512 MiB at most, whatever a rank sends") {
  constexpr std::size_t GiB = std::size_t{1} << 30;
  CHECK(kernels::memory_of_scatter({8}, GiB, 2).received == GiB / 2);
  CHECK(kernels::memory_of_sum({2}, GiB, 4).received == GiB / 2);
  CHECK(kernels::memory_of_codes({2}, GiB, CodeBits::eight, CodeBits::eight).received <= GiB / 2);
  CHECK(kernels::memory_of_scatter({16, 8}, GiB, 2).received == GiB / 2);
  CHECK(kernels::memory_of_scatter({1}, GiB, 2).received == 0);
}

// It needs no NCCL, and works on a machine with one GPU.
TEST_CASE("a group of one rank on a GPU gives the same bits as every other communicator", "[gpu]") {
  check_on_gpus(
      2, [](std::size_t) { return 0; },
      [](Communicator& ranks, const Stream& stream, const Channel& channel, const MemoryAccounts&) {
        MemoryAccounts accounts;
        const bool is_on_gpu = ranks.rank() == 0;  // the other rank makes a group in host memory meanwhile
        const auto alone = ranks.split(ranks.rank(), is_on_gpu ? &channel : nullptr);
        if (is_on_gpu) everything(*alone, stream, accounts);
      });
}
