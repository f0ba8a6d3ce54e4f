// Encoded collectives have the bits of a plain reference on every communicator, and send the bytes that they promise.
#include <fmt/format.h>

#include <catch2/catch.hpp>
#include <cmath>

#include "kernels/runtime/buffer.h"
#include "tests/comm/encoded_reference.h"
#include "tests/comm/test_groups.h"
#include "tests/sanitizer.h"
#include "tests/skip.h"

namespace ballast::testing::encoded {
namespace {

constexpr CodeBits eight = CodeBits::eight;
constexpr CodeBits four = CodeBits::four;
constexpr std::size_t counts[] = {0, 1, 127, 128, 1000, sanitized ? 4'999 : 19'991};
constexpr std::size_t large_count = (std::size_t{9} << 17) + 3;   // several chunks of three ranks
constexpr std::size_t larger_count = (std::size_t{9} << 18) + 3;  // the same of two
// Memory for encoded bytes; in memory that peers read in place if there is such memory and it is asked for.
class Codes {
 public:
  Codes(Communicator& ranks, std::size_t bytes, bool shared) : bytes_(bytes) {
    if (shared && ranks.shared_memory() != nullptr && bytes > 0) {
      buffer_ = allocate(accounts_, {.bytes = bytes, .owner = "codes", .allocator = ranks.shared_memory()});
    }
    private_.resize(buffer_.bytes() > 0 ? 0 : bytes / sizeof(float));
  }
  Encoding encoding(CodeBits values, CodeBits sums) {
    std::byte* const own = reinterpret_cast<std::byte*>(private_.data());
    return {.values = values,
            .sums = sums,
            .stream = wire_stream,
            .memory = {buffer_.bytes() > 0 ? buffer_.data() : own, bytes_, DType::u8}};
  }

 private:
  std::size_t bytes_;
  MemoryAccounts accounts_;
  Buffer buffer_{};
  std::vector<float> private_;
};

std::string of(DType dtype, std::size_t count, CodeBits values, CodeBits sums) {
  return fmt::format("{} {}, {} and {}", count, name(dtype), values == eight ? 8 : 4, sums == eight ? 8 : 4);
}

void gathers(Communicator& ranks, DType dtype, std::size_t count, CodeBits bits, bool shared) {
  Codes codes(ranks, kernels::encoded_parts_bytes(count, ranks.size(), bits), shared);
  const std::size_t before = ranks.sent().inside + ranks.sent().across;
  Values all(dtype, ranks.size() * count);
  all.put(ranks.rank() * count, Values::of_rank(ranks.rank(), dtype, count));
  ranks.all_gather(all.view().part(ranks.rank() * count, count), all.view(), codes.encoding(bits, bits));
  expect(all == gathered_codes(ranks.size(), dtype, count, bits), "all_gather of " + of(dtype, count, bits, bits));
  const std::size_t sent = ranks.sent().inside + ranks.sent().across - before;
  expect(sent >= (ranks.size() - 1) * kernels::quantized_bytes(count, bits), "bytes sent");
}

void scatters(Communicator& ranks, DType dtype, std::size_t count, DType into, const Summands& summands,
              const Encoding& encoding) {
  const Values all = Values::of_rank(ranks.rank(), dtype, ranks.size() * count);
  Values part = overwritten(count, into);
  ranks.reduce_scatter(all.view(), part.view(), encoding);
  expect(part == scattered_codes(summands, dtype, count, ranks.rank(), into, encoding),
         "reduce_scatter of " + of(dtype, count, encoding.values, encoding.sums));
}

void reduces(Communicator& ranks, DType dtype, std::size_t count, DType into, const Summands& summands,
             const Encoding& encoding) {
  Values whole = overwritten(count, into);
  ranks.all_reduce(Values::of_rank(ranks.rank(), dtype, count).view(), whole.view(), encoding);
  expect(whole == reduced_codes(summands, dtype, count, into, encoding),
         "all_reduce of " + of(dtype, count, encoding.values, encoding.sums));
}

struct Formats {
  DType values;
  DType into;
  CodeBits bits;
  CodeBits bits_of_sums;
};
constexpr Formats all_formats[] = {{DType::bf16, DType::bf16, eight, four},
                                   {DType::fp16, DType::fp32, four, eight},
                                   {DType::fp32, DType::fp32, eight, eight}};

void adds(Communicator& ranks, const Formats& formats, std::size_t count, std::size_t ranks_per_host, bool shared) {
  const Summands summands(ranks.size(), ranks_per_host);
  Codes codes(ranks,
              std::max(kernels::encoded_parts_bytes(count, ranks.size(), formats.bits),
                       kernels::encoded_all_reduce_bytes(count, ranks.size(), formats.bits, formats.bits_of_sums)),
              shared);
  const Encoding encoding = codes.encoding(formats.bits, formats.bits_of_sums);
  scatters(ranks, formats.values, count, formats.into, summands, encoding);
  reduces(ranks, formats.values, count, formats.into, summands, encoding);
}

void check_all(Communicator& ranks, std::size_t count, std::size_t ranks_per_host) {
  for (const Formats& formats : all_formats) {
    const bool shared = formats.bits == formats.bits_of_sums;
    gathers(ranks, formats.values, count, formats.bits, shared);
    adds(ranks, formats, count, ranks_per_host, shared);
  }
}

// The bytes that a rank sends in an exact and in an encoded reduction.
struct SentOf {
  SentBytes exact{};
  SentBytes encoded{};
};
SentOf bytes_of_reduction(Communicator& ranks, CodeBits values, CodeBits sums) {
  const std::size_t count = 3 * group_size;
  const Values all(DType::bf16, ranks.size() * count);
  Values part(DType::fp32, count);
  Codes codes(ranks, kernels::encoded_parts_bytes(count, ranks.size(), values), false);
  const auto since = [&](const SentBytes& before) {
    const SentBytes now = ranks.sent();
    return SentBytes{now.inside - before.inside, now.across - before.across};
  };
  const SentBytes before = ranks.sent();
  ranks.reduce_scatter(all.view(), part.view());
  const SentBytes exact = since(before);
  const SentBytes between = ranks.sent();
  ranks.reduce_scatter(all.view(), part.view(), codes.encoding(values, sums));
  return {exact, since(between)};
}

}  // namespace

TEST_CASE("encoded collectives have the bits of a plain reference") {
  for (const std::size_t size : {1u, 2u, 3u, 5u}) {
    on_all_groups(size, [](Communicator& ranks) {
      for (const std::size_t count : counts) {
        check_all(ranks, count, 1);
      }
    });
  }
}

TEST_CASE("the sums of hosts are encoded once more, with the same bits on every transport") {
  for (const GroupShape shape : {GroupShape(4, 2), GroupShape(6, 2), GroupShape(6, 3)}) {
    on_all_groups(shape, [&](Communicator& ranks) {
      for (const std::size_t count : counts) {
        check_all(ranks, count, shape.ranks_per_host);
      }
    });
  }
}

TEST_CASE("large encoded collectives have the bits of a plain reference") {
  if (sanitized) return skip("takes minutes");
  on_all_groups(3, [](Communicator& ranks) {
    gathers(ranks, DType::bf16, large_count, eight, false);
    adds(ranks, all_formats[0], large_count, 1, true);
  });
}

TEST_CASE("large sums of hosts have the bits of a plain reference") {
  if (sanitized) return skip("takes minutes");
  on_all_groups({4, 2}, [](Communicator& ranks) {
    Codes codes(ranks, kernels::encoded_parts_bytes(larger_count, ranks.size(), eight), false);
    scatters(ranks, DType::bf16, larger_count, DType::fp32, {4, 2}, codes.encoding(eight, eight));
  });
}

TEST_CASE("a block with a value that is not finite becomes NaN on all ranks, and no other block") {
  for (const GroupShape shape : {GroupShape(2), GroupShape(4, 2)}) {
    on_all_groups(shape, [](Communicator& ranks) {
      const std::size_t count = 4 * group_size;
      Values mine = Values::of_rank(ranks.rank(), DType::bf16, count);
      if (ranks.rank() == 1) mine.set(group_size + 5, std::numeric_limits<float>::infinity());
      if (ranks.rank() == 1) mine.set(3 * group_size, std::numeric_limits<float>::quiet_NaN());
      Codes codes(ranks, kernels::encoded_parts_bytes(count, ranks.size(), eight), false);
      Values sum(DType::fp32, count);
      ranks.all_reduce(mine.view(), sum.view(), codes.encoding(eight, four));
      for (std::size_t i = 0; i < count; ++i) {
        const bool is_bad = i / group_size == 1 || i / group_size == 3;
        expect(std::isnan(sum.get(i)) == is_bad, fmt::format("element {} of a sum is {}", i, sum.get(i)));
      }
      Values all(DType::bf16, ranks.size() * count);
      ranks.all_gather(mine.view(), all.view(), codes.encoding(eight, eight));
      for (std::size_t i = 0; i < all.view().count(); ++i) {
        const std::size_t block = i / group_size;
        expect(std::isnan(all.get(i)) == (block == 5 || block == 7), fmt::format("element {} of a gather", i));
      }
    });
  }
}

TEST_CASE("int8 sends at most 0.52 of the bytes of bf16 values") {
  on_all_groups(3, [](Communicator& ranks) {
    const SentOf sent = bytes_of_reduction(ranks, eight, eight);
    expect(sent.exact.inside + sent.exact.across == 2u * 2 * 3 * group_size, "exact bytes");
    expect(sent.encoded.inside + sent.encoded.across == 2u * 3 * 132, "encoded bytes");
    expect(2u * 3 * 132 <= 0.52 * (2u * 2 * 3 * group_size), "the bar");
  });
}

TEST_CASE("int4 between hosts sends at most 0.30 of the bytes of bf16 values, and int8 inside a host 0.52") {
  const auto has_links = [](const GroupKind& kind) { return kind.name.find("gloo") != std::string::npos; };
  if (std::ranges::none_of(group_kinds(), has_links)) return skip("this build has no Gloo, and others have no links");
  for (const GroupKind& kind : group_kinds()) {
    if (!has_links(kind)) continue;
    const Failures failures = kind.run({4, 2}, patient, [](Communicator& ranks) {
      const SentOf sent = bytes_of_reduction(ranks, eight, four);
      const std::size_t values =
          3 * group_size;  // values of a part; one goes to the other host, and one of each host to a neighbour
      expect(sent.exact.inside == 2 * 2 * values && sent.encoded.inside == 2 * 3 * 132, "bytes inside the host");
      expect(sent.exact.across == 4 * values && sent.encoded.across == 3 * 68, "bytes between hosts");
      expect(3 * 132 <= 0.52 * 2 * values && 3 * 68 <= 0.30 * 2 * values, "the bars");
    });
    CHECK(failures == Failures(4));
  }
}

TEST_CASE("random bits belong to an element of a tensor, wherever it lies among others") {
  on_all_groups(2, [](Communicator& ranks) {
    const std::size_t counts[] = {4 * group_size, 6 * group_size};
    // Adds elements of two tensors, of which each rank gets a half, and gathers the halves.
    const auto added = [&](std::size_t first, std::size_t count, const std::vector<kernels::Run>& tensors) {
      const Values all = of_rank(ranks.rank(), DType::bf16, first, count);
      Values part(DType::fp32, count / 2), whole(DType::fp32, count);
      Codes codes(ranks, kernels::encoded_parts_bytes(count / 2, 2, eight), false);
      Encoding encoding = codes.encoding(eight, eight);
      encoding.tensors = tensors;
      ranks.reduce_scatter(all.view(), part.view(), encoding);
      ranks.all_gather(part.view(), whole.view());
      return whole;
    };
    Values apart(DType::fp32, counts[0] + counts[1]);
    apart.put(0, added(0, counts[0], {{.count = counts[0], .tensor = 7}}));
    apart.put(counts[0], added(counts[0], counts[1], {{.count = counts[1], .tensor = 9}}));
    const std::vector<kernels::Run> both{
        {.count = counts[0], .tensor = 7},
        {.begin = counts[0], .count = counts[1], .tensor = 9, .tensor_begin = counts[0]}};
    expect(added(0, counts[0] + counts[1], both) == apart, "the sums of two tensors together are those of each alone");
    expect(!(added(0, counts[0] + counts[1], {}) == apart), "a tensor's number counts");
  });
}

TEST_CASE("memory that is too small for the codes is refused") {
  constexpr std::size_t count = 4 * group_size;
  using Body = std::function<void(Communicator & ranks, const Values& mine, const Encoding& encoding)>;
  const auto check_refused = [](std::size_t needed, const Body& call) {
    on_all_groups(2, [&](Communicator& ranks) {
      Codes codes(ranks, needed - kernels::block_bytes(four), false);
      std::string error;
      try {
        call(ranks, Values::of_rank(ranks.rank(), DType::bf16, count), codes.encoding(four, eight));
      } catch (const std::exception& refused) {
        error = refused.what();
      }
      expect(error.find(fmt::format("{} bytes", needed)) != std::string::npos, "an error with the bytes: " + error);
    });
  };
  const std::size_t of_parts = kernels::encoded_parts_bytes(count, 2, four);
  check_refused(of_parts, [](Communicator& ranks, const Values& mine, const Encoding& encoding) {
    Values all(DType::bf16, 2 * count);
    ranks.all_gather(mine.view(), all.view(), encoding);
  });
  check_refused(kernels::encoded_parts_bytes(count / 2, 2, four),
                [](Communicator& ranks, const Values& mine, const Encoding& encoding) {
                  Values half(DType::fp32, count / 2);
                  ranks.reduce_scatter(mine.view(), half.view(), encoding);
                });
  const std::size_t of_sums = kernels::encoded_all_reduce_bytes(count, 2, four, eight);
  check_refused(of_sums, [](Communicator& ranks, const Values& mine, const Encoding& encoding) {
    Values sum(DType::fp32, count);
    ranks.all_reduce(mine.view(), sum.view(), encoding);
  });
}

// A communicator of another library, which was written before there were encoded collectives.
class PlainCommunicator final : public Communicator {
 public:
  std::size_t rank() const override { return 0; }
  std::size_t size() const override { return 2; }
  Allocator* shared_memory() override { return nullptr; }
  using Communicator::all_gather;
  using Communicator::all_reduce;
  using Communicator::reduce_scatter;
  void all_gather(ConstView, View) override {}
  void reduce_scatter(ConstView, View) override {}
  void all_reduce(ConstView, View) override {}
  void all_reduce(std::span<std::int64_t>) override {}
  void broadcast(View, std::size_t) override {}
  void barrier() override {}
  using Communicator::split;
  std::unique_ptr<Communicator> split(std::size_t) override { return nullptr; }
  void abort(std::string_view) override {}
  void leave(const LeaveReason&) override {}
  void set_activity(std::string_view) override {}
};

TEST_CASE("a communicator without encoded collectives refuses them, and needs no code for them") {
  PlainCommunicator plain;
  Values values(DType::fp32, 2);
  using Catch::Contains;
  CHECK_THROWS_WITH(plain.all_gather(values.view(), values.view(), Encoding{.memory = {}}), Contains("B1005"));
  CHECK_THROWS_WITH(plain.reduce_scatter(values.view(), values.view(), Encoding{.memory = {}}), Contains("B1005"));
  CHECK_THROWS_WITH(plain.all_reduce(values.view(), values.view(), Encoding{.memory = {}}), Contains("B1005"));
  CHECK(plain.sent().inside == 0);
}

TEST_CASE("ranks that encode differently are refused") {
  on_all_groups(2, [](Communicator& ranks) {
    Codes codes(ranks, 4096, false);
    Values all(DType::bf16, 2 * group_size);
    const Values mine = Values::of_rank(ranks.rank(), DType::bf16, group_size);
    std::string error;
    try {
      ranks.all_gather(mine.view(), all.view(), codes.encoding(ranks.rank() == 0 ? eight : four, eight));
    } catch (const std::exception& refused) {
      error = refused.what();
    }
    expect(error.find("all_gather of 128 bf16, sent as int") != std::string::npos,
           "an error that names both: " + error);
  });
}

}  // namespace ballast::testing::encoded
