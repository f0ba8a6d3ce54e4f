#include "zero/comm/nccl_transport.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "kernels/reduction_memory.h"
#include "kernels/runtime/buffer.h"
#include "zero/comm/nccl_communicator.h"
#include "zero/comm/nccl_library.h"

namespace ballast {
namespace {

class NcclTransport : public ProcessTransport {
 public:
  NcclTransport(std::unique_ptr<Transport> host, const ProcessGroup& members, const GpuStream& stream,
                MemoryAccounts& accounts, MakeTransport make)
      : ProcessTransport(members, std::move(make)),
        host_(std::move(host)),
        stream_(stream.stream),
        gpu_(stream.gpu),
        accounts_(accounts) {
    if (size() > 1) nccl_.emplace(group(), stream);
  }

  std::size_t max_chunk_bytes(ChunkMemory where, std::span<const std::byte> bytes) const override {
    return where == ChunkMemory::host ? host_->max_chunk_bytes(where, bytes) : kernels::most_sent_bytes(size());
  }

  bool has_links() const override { return true; }

  void use_memory(const View& received, const View& sums) override {
    given_received_ = received;
    given_sums_ = sums;
  }

  std::byte* scratch(std::size_t bytes) override { return reserved(given_sums_, scratch_, bytes, "sums, group "); }

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
  std::byte* received_from(std::size_t peer, const SentChunk& chunk) const {
    return at_received_ + kernels::received_bytes(peer, chunk.bytes);
  }

  // Returns the memory that was given, or else the group's own. A group that only gathers needs none, encoded or not. The old
  // memory is freed when the stream has used it.
  std::byte* reserved(const View& given, Buffer& memory, std::size_t bytes, std::string_view owner) const {
    if (given.bytes() >= bytes) return given.data();
    if (memory.bytes() < bytes) {
      memory = {};
      memory = allocate(
          accounts_,
          {.kind = MemoryKind::device, .bytes = bytes, .owner = std::string(owner) + group().name(), .gpu = gpu_});
    }
    return memory.data();
  }

  void send_and_receive(const SentChunk& chunk) {
    at_received_ = reserved(given_received_, received_, kernels::received_bytes(size(), chunk.bytes), "nccl, group ");
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
  View given_received_{};  // see use_memory()
  View given_sums_{};
  Buffer received_{};  // where the given memory is too small
  Buffer scratch_{};
  std::byte* at_received_ = nullptr;        // in one of them: of each rank, one after the other
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
