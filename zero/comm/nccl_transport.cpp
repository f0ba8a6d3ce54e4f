#include "zero/comm/nccl_transport.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels/runtime/buffer.h"
#include "zero/comm/nccl_communicator.h"
#include "zero/comm/nccl_library.h"

namespace ballast {
namespace {

// Of one exchange of all ranks: a transformer's layer in most models, so that its gradients are added in one pass.
constexpr std::size_t max_received_bytes = std::size_t{512} << 20;
constexpr std::size_t alignment = 512;

class NcclTransport : public ProcessTransport {
 public:
  NcclTransport(std::unique_ptr<Transport> host, const ProcessGroup& members, const GpuStream& stream,
                MemoryAccounts& accounts, MakeTransport make)
      : ProcessTransport(members, std::move(make)),
        host_(std::move(host)),
        stream_(stream.stream),
        gpu_(stream.gpu),
        accounts_(accounts),
        max_chunk_bytes_(max_received_bytes / size() / alignment * alignment) {
    if (size() > 1) nccl_.emplace(group(), stream);
  }

  std::size_t max_chunk_bytes(ChunkMemory where, std::span<const std::byte> bytes) const override {
    return where == ChunkMemory::host ? host_->max_chunk_bytes(where, bytes) : max_chunk_bytes_;
  }

  bool has_links() const override { return true; }

  std::byte* scratch(std::size_t bytes) override { return reserved(scratch_, bytes, "sums, group "); }

  void exchange(const SentChunk& chunk, const Receive& receive) override {
    if (chunk.where == ChunkMemory::host) return host_->exchange(chunk, receive);
    exchange_together(chunk, [&](std::span<const std::byte* const> by_rank, std::size_t, std::size_t) {
      for (std::size_t peer = 0; peer < size(); ++peer) {
        if (chunk.sends(peer)) receive(peer, {by_rank[peer], chunk.bytes}, 0);
      }
    });
  }

  void exchange_together(const SentChunk& chunk, const ReceiveTogether& receive) override {
    chunk.make(0, chunk.bytes);
    if (nccl_) send_and_receive(chunk);
    std::vector<const std::byte*> by_rank;
    for (std::size_t peer = 0; peer < size(); ++peer) {
      by_rank.push_back(peer == rank() ? chunk.piece(peer).data() : received_from(peer, chunk));
    }
    receive(by_rank, chunk.bytes, 0);
  }

  void exchange_parts(const Parts& parts) override {
    if (!nccl_) return;  // it has none for others
    nccl_->issue([&](ncclComm_t nccl) {
      for (const SentPart& part : parts.sent) {
        check_nccl(nccl_calls().send(part.values.data(), part.values.bytes(), ncclUint8, static_cast<int>(part.rank),
                                     nccl, stream_));
      }
      for (const ReceivedPart& part : parts.received) {
        check_nccl(nccl_calls().receive(part.values.data(), part.values.bytes(), ncclUint8, static_cast<int>(part.rank),
                                        nccl, stream_));
      }
    });
  }

  bool all_gather(const SentChunk& mine, std::span<std::byte> all) override {
    if (mine.where == ChunkMemory::host || !nccl_) return false;
    nccl_->issue([&](ncclComm_t nccl) {
      check_nccl(nccl_calls().all_gather(mine.data, all.data(), mine.bytes, ncclUint8, nccl, stream_));
    });
    return true;
  }

 private:
  static std::size_t padded(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

  std::byte* received_from(std::size_t peer, const SentChunk& chunk) const {
    return received_.data() + peer * padded(chunk.bytes);
  }

  // A group that only gathers needs none, encoded or not. The old memory is freed when the stream has used it.
  std::byte* reserved(Buffer& memory, std::size_t bytes, std::string_view owner) const {
    if (memory.bytes() < bytes) {
      memory = {};
      memory = allocate(
          accounts_,
          {.kind = MemoryKind::device, .bytes = bytes, .owner = std::string(owner) + group().name(), .gpu = gpu_});
    }
    return memory.data();
  }

  void send_and_receive(const SentChunk& chunk) {
    reserved(received_, size() * padded(chunk.bytes), "nccl, group ");
    nccl_->issue([&](ncclComm_t nccl) {
      for (std::size_t peer = 0; peer < size(); ++peer) {
        if (peer != rank()) send_and_receive(chunk, peer, nccl);
      }
    });
  }

  void send_and_receive(const SentChunk& chunk, std::size_t peer, ncclComm_t nccl) const {
    const int other = static_cast<int>(peer);
    if (chunk.sends(rank())) {
      check_nccl(nccl_calls().send(chunk.piece(peer).data(), chunk.bytes, ncclUint8, other, nccl, stream_));
    }
    if (chunk.sends(peer)) {
      check_nccl(nccl_calls().receive(received_from(peer, chunk), chunk.bytes, ncclUint8, other, nccl, stream_));
    }
  }

  std::unique_ptr<Transport> host_;
  StreamHandle stream_;
  int gpu_;
  MemoryAccounts& accounts_;
  std::size_t max_chunk_bytes_;
  Buffer received_{};  // of each rank, one after the other
  Buffer scratch_{};
  std::optional<NcclCommunicator> nccl_{};  // null: this rank is alone
};

}  // namespace

std::string no_nccl_because() {
  try {
    nccl_calls();
    return {};
  } catch (const Error& error) {
    return error.problem().available;
  }
}

std::unique_ptr<Transport> nccl_transport(std::unique_ptr<Transport> host, const ProcessGroup& group,
                                          const GpuStream& stream, MemoryAccounts& accounts,
                                          const MakeTransport& make) {
  if (group.size() > 1) nccl_calls();  // throws before other ranks are waited for
  return std::make_unique<NcclTransport>(std::move(host), group, stream, accounts, make);
}

}  // namespace ballast
