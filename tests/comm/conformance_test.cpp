// Tests that every communicator passes.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <numeric>
#include <thread>

#include "kernels/reduction_memory.h"
#include "tests/comm/rank_values.h"
#include "tests/comm/test_groups.h"
#include "tests/sanitizer.h"
#include "zero/comm/transport.h"

using namespace ballast;
using namespace ballast::testing;

namespace {

constexpr std::size_t sizes[] = {1, 2, 3, 4, 5};
constexpr std::size_t counts[] = {0, 1, 7, 1000, sanitized ? 4999 : 99991};
constexpr std::size_t large_count = (std::size_t{sanitized ? 4 : 64} << 20) / sizeof(float) + 3;  // many chunks

std::string of(DType dtype, std::size_t count) { return fmt::format("{} {}", count, name(dtype)); }

void gathers(Communicator& ranks, DType dtype, std::size_t count) {
  Values expected(dtype, ranks.size() * count);
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    expected.put(rank * count, Values::of_rank(rank, dtype, count));
  }
  const Values mine = Values::of_rank(ranks.rank(), dtype, count);
  Values all(dtype, ranks.size() * count);
  ranks.all_gather(mine.view(), all.view());
  expect(all == expected, "all_gather of " + of(dtype, count));

  Values in_place(dtype, ranks.size() * count);
  in_place.put(ranks.rank() * count, mine);
  ranks.all_gather(in_place.view().part(ranks.rank() * count, count), in_place.view());
  expect(in_place == expected, "all_gather in place of " + of(dtype, count));
}

void reduces(Communicator& ranks, DType dtype, std::size_t count, DType sum, std::size_t ranks_per_host = 1) {
  const Summands summands(ranks.size(), ranks_per_host);
  const auto expected = [&](std::size_t first) { return summed_and_rounded(summands, dtype, first, count, sum); };
  const std::string what = of(dtype, count) + " in " + std::string(name(sum));
  const Values all = Values::of_rank(ranks.rank(), dtype, ranks.size() * count);
  Values part = overwritten(count, sum);
  ranks.reduce_scatter(all.view(), part.view());
  expect(part == expected(ranks.rank() * count), "reduce_scatter of " + what);

  Values whole = overwritten(count, sum);
  ranks.all_reduce(all.view().part(0, count), whole.view());
  expect(whole == expected(0), "all_reduce of " + what);
}

void broadcasts(Communicator& ranks, DType dtype, std::size_t count) {
  for (std::size_t root = 0; root < ranks.size(); ++root) {
    Values values = Values::of_rank(ranks.rank(), dtype, count);
    ranks.broadcast(values.view(), root);
    expect(values == Values::of_rank(root, dtype, count),
           fmt::format("broadcast of {} from {}", of(dtype, count), root));
  }
}

void adds_integers(Communicator& ranks, std::size_t count) {
  std::vector<std::int64_t> values(count);
  std::iota(values.begin(), values.end(), static_cast<std::int64_t>(ranks.rank()) << 40);
  ranks.all_reduce(values);
  const auto size = static_cast<std::int64_t>(ranks.size());
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t sum = (size * (size - 1) / 2 << 40) + size * static_cast<std::int64_t>(i);
    expect(values[i] == sum, fmt::format("integer {} of {}", i, count));
  }
}

// Parts between two ranks: as many as `sender` + 1, longer the larger the receiver is; a rank sends none to the next one.
std::size_t parts_between(std::size_t sender, std::size_t receiver, std::size_t ranks) {
  return ranks > 1 && receiver == (sender + 1) % ranks ? 0 : sender + 1;
}

Values part_of(std::size_t sender, std::size_t receiver, std::size_t number, std::size_t count) {
  return Values::of_rank(7 * sender + 5 * receiver + number, DType::bf16, receiver * count + number);
}

// No two ranks' lists agree in their order: only the order between each two ranks counts.
void exchanges(Communicator& ranks, std::size_t count) {
  const std::size_t size = ranks.size();
  const std::size_t self = ranks.rank();
  std::vector<Values> sent;
  std::vector<Values> received;
  std::vector<std::size_t> to;
  std::vector<std::size_t> from;
  for (std::size_t number = 0; number < size; ++number) {
    for (std::size_t away = 0; away < size; ++away) {
      const std::size_t peer = (self + away) % size;
      if (number < parts_between(self, peer, size)) {
        sent.push_back(part_of(self, peer, number, count));
        to.push_back(peer);
      }
      if (number < parts_between(peer, self, size)) {
        received.push_back(overwritten(self * count + number, DType::bf16));
        from.push_back(peer);
      }
    }
  }
  std::vector<SentPart> of_sent;
  std::vector<ReceivedPart> of_received;
  for (std::size_t i = 0; i < sent.size(); ++i)
    of_sent.push_back({to[i], sent[i].view()});
  for (std::size_t i = 0; i < received.size(); ++i)
    of_received.push_back({from[i], received[i].view()});
  const SentBytes before = ranks.sent();
  ranks.exchange(of_sent, of_received);
  std::vector<std::size_t> next(size);
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < received.size(); ++i)
    expect(received[i] == part_of(from[i], self, next[from[i]]++, count), fmt::format("exchange with {}", from[i]));
  for (std::size_t i = 0; i < sent.size(); ++i)
    bytes += to[i] == self ? 0 : sent[i].view().bytes();
  const SentBytes after = ranks.sent();
  expect(after.inside + after.across - before.inside - before.across == bytes, "the sent bytes of an exchange");
}

void check_all_collectives(Communicator& ranks, std::size_t count, std::size_t ranks_per_host = 1) {
  for (const DType dtype : all_dtypes) {
    gathers(ranks, dtype, count);
    broadcasts(ranks, dtype, count);
  }
  for (const DType dtype : float_dtypes) {
    reduces(ranks, dtype, count, DType::fp32, ranks_per_host);
    if (dtype != DType::fp16) reduces(ranks, dtype, count, DType::bf16, ranks_per_host);
  }
  adds_integers(ranks, count);
  exchanges(ranks, count);
}

}  // namespace

TEST_CASE("collectives return the values of all ranks, summed in rank order") {
  for (const std::size_t size : sizes) {
    on_all_groups(size, [](Communicator& ranks) {
      for (const std::size_t count : counts) {
        check_all_collectives(ranks, count);
      }
    });
  }
}

TEST_CASE("the ranks of each host are added first, and then the hosts, on every transport") {
  for (const GroupShape shape : {GroupShape(4, 2), GroupShape(6, 2), GroupShape(6, 3)}) {
    on_all_groups(shape, [&](Communicator& ranks) {
      for (const std::size_t count : counts) {
        check_all_collectives(ranks, count, shape.ranks_per_host);
      }
      const auto one_of_each = ranks.split(ranks.rank() % shape.ranks_per_host);
      expect(one_of_each->size() == shape.size / shape.ranks_per_host, "a rank of each host");
      check_all_collectives(*one_of_each, 1000);
    });
  }
  expect(summed(4, DType::fp32, 0, 1000) != summed({4, 2}, DType::fp32, 0, 1000), "the two orders differ");
}

TEST_CASE("ranks are added in rank order where hosts are not alike") {
  using Hosts = std::vector<std::string>;
  CHECK(kernels::ranks_per_host(Hosts{"a", "a", "b", "b"}) == 2);
  CHECK(kernels::ranks_per_host(Hosts{"a", "a", "a", "b", "b", "b"}) == 3);
  CHECK(kernels::ranks_per_host(Hosts{"a", "b", "c"}) == 1);
  for (const Hosts& hosts :
       {Hosts{"a"}, Hosts{"a", "a"}, Hosts{"a", "a", "b"}, Hosts{"a", "b", "a", "b"},
        Hosts{"a", "a", "b", "b", "a", "a"}, Hosts{"a", "a", "b", "b", "b", "b"}, Hosts{"a", "a", "b", "c"}}) {
    CHECK(kernels::ranks_per_host(hosts) == 1);
  }
}

TEST_CASE("large collectives return the values of all ranks") {
  for (std::size_t size = sanitized ? 3 : 2; size <= 3; ++size) {
    on_all_groups(size, [](Communicator& ranks) {
      gathers(ranks, DType::bf16, large_count / ranks.size());
      reduces(ranks, DType::fp32, large_count / ranks.size(), DType::fp32);
      reduces(ranks, DType::bf16, large_count / ranks.size(), DType::bf16);
      exchanges(ranks, large_count / ranks.size() / ranks.size());
    });
  }
  on_all_groups({4, 2}, [](Communicator& ranks) {
    gathers(ranks, DType::bf16, large_count / ranks.size());
    reduces(ranks, DType::bf16, large_count / ranks.size(), DType::fp32, 2);
  });
}

TEST_CASE("no rank leaves a barrier before all ranks have arrived") {
  for (const std::size_t size : sizes) {
    on_all_groups(size, [](Communicator& ranks) {
      for (std::size_t late = 0; late < ranks.size(); ++late) {
        using Clock = std::chrono::steady_clock;
        if (ranks.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(30));
        std::int64_t came[] = {ranks.rank() == late ? Clock::now().time_since_epoch().count() : 0};
        ranks.barrier();
        const std::int64_t left = Clock::now().time_since_epoch().count();
        ranks.all_reduce(came);
        expect(left >= came[0], fmt::format("a rank left before rank {} came", late));
      }
    });
  }
}

TEST_CASE("a split groups the ranks of one color in rank order") {
  for (const std::size_t size : sizes) {
    on_all_groups(size, [](Communicator& ranks) {
      const std::size_t color = ranks.rank() % 2;
      const auto half = ranks.split(color);
      expect(half->rank() == ranks.rank() / 2, "rank in the part");
      expect(half->size() == (ranks.size() + 1 - color) / 2, "size of the part");
      check_all_collectives(*half, 1000);
      const auto quarter = half->split(half->rank() % 2);
      check_all_collectives(*quarter, 100);
      check_all_collectives(ranks, 10);
    });
  }
}

TEST_CASE("a rank may leave before the others, which continue without it") {
  for (std::size_t leaving = 0; leaving < 3; ++leaving) {
    on_all_groups(3, [leaving](Communicator& ranks) {
      const auto part = ranks.split(ranks.rank() == leaving ? 1 : 0);
      check_all_collectives(*part, 1000);
      if (ranks.rank() == leaving) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      check_all_collectives(*part, 1000);
    });
  }
}

TEST_CASE("threads use their own communicators at the same time, each in its own order") {
  for (const std::size_t size : sizes) {
    on_all_groups(size, [](Communicator& ranks) {
      constexpr std::size_t channels = 3;
      std::vector<std::unique_ptr<Communicator>> splits;
      for (std::size_t channel = 0; channel < channels; ++channel) {
        splits.push_back(ranks.split(0));
      }
      std::vector<std::string> failures(channels);
      std::vector<std::thread> threads;
      for (std::size_t channel = 0; channel < channels; ++channel) {
        threads.emplace_back([&, channel] {
          try {
            std::this_thread::sleep_for(std::chrono::milliseconds((channel + ranks.rank()) % channels));
            for (int round = 0; round < 10; ++round) {
              check_all_collectives(*splits[channel], 100 + channel);
            }
          } catch (const std::exception& failure) {
            failures[channel] = failure.what();
          }
        });
      }
      for (std::thread& thread : threads) {
        thread.join();
      }
      for (const std::string& failure : failures) {
        expect(failure.empty(), failure);
      }
    });
  }
}
