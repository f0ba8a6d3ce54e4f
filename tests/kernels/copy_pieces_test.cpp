#include <algorithm>
#include <numeric>

#include "kernels/pieces.h"
#include "tests/kernels/device_backends.h"

namespace ballast::kernels {
namespace {

constexpr std::size_t sizes[] = {0, 1, 5, 300'000, 0, 130, 127, 128, 129, 1, 1, 70'001, 1'000, 64, 0};

std::size_t work_in(const std::vector<CopyStretch>& stretches) {
  std::size_t work = 0;
  for (const CopyStretch& stretch : stretches) {
    work += stretch.end - stretch.begin;
  }
  return work;
}

// Cuts one flat buffer into pieces, with gaps between them, and puts it together again in another order.
void packs_and_unpacks(TestBackend& on) {
  const std::size_t total = std::accumulate(std::begin(sizes), std::end(sizes), std::size_t{0});
  const Patterns values = finite_patterns(DType::bf16, total, 1);
  const Placed flat(on, values, DType::bf16);
  const Placed again(on, Patterns(total), DType::bf16, 1);
  std::vector<Placed> apart;
  std::vector<CopyPiece> unpack;
  std::vector<CopyPiece> pack;
  std::size_t first = 0;
  for (const std::size_t size : sizes) {
    const DType dtype = floating_dtypes[apart.size() % 2];  // fp32 holds every bf16
    apart.emplace_back(on, Patterns(size), dtype, apart.size());
    unpack.push_back({flat.view().part(first, size), apart.back().view()});
    pack.push_back({apart.back().view(), again.view().part(first, size)});
    first += size;
  }
  std::ranges::reverse(pack);
  on.kernels().copy_pieces(unpack);
  on.kernels().copy_pieces(pack);
  CHECK(again.read() == values);
  for (const Placed& piece : apart) {
    piece.read();
  }
}

}  // namespace

TEST_CASE("pieces of any size and format are copied") { on_every_cpu(packs_and_unpacks); }
TEST_CASE("copying no pieces does nothing") { plain_backend().copy_pieces({}); }

TEST_CASE("CUDA's threads copy pieces of any size and format") { on_octets(packs_and_unpacks); }
TEST_CASE("CUDA copies pieces of any size and format", "[gpu]") { on_cuda(packs_and_unpacks); }

TEST_CASE("a plan of copies covers every element once, in parts of equal work") {
  std::vector<CopyPiece> pieces;
  for (const std::size_t size : sizes) {
    pieces.push_back({{nullptr, size, DType::u8}, {nullptr, size, DType::u8}});
  }
  for (const std::size_t grain : {1'000u, 65'536u, 1'000'000u}) {
    const CopyPlan plan(pieces, grain);
    std::vector<std::size_t> done(pieces.size());
    for (std::size_t i = 0; i < plan.parts(); ++i) {
      const std::vector<CopyStretch> part = plan.part(i);
      CHECK(work_in(part) <= grain + 128);
      for (const CopyStretch& stretch : part) {
        CHECK(stretch.begin == done[stretch.piece]);
        CHECK((stretch.end % 128 == 0 || stretch.end == sizes[stretch.piece]));
        done[stretch.piece] = stretch.end;
      }
    }
    CHECK(std::equal(done.begin(), done.end(), std::begin(sizes)));
  }
}

TEST_CASE("a plan of copies spreads many empty pieces over many parts") {
  const std::vector<CopyPiece> pieces(10'000);
  CHECK(CopyPlan(pieces, 65'536).parts() > 10);
}

}  // namespace ballast::kernels
