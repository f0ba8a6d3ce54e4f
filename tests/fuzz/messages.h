// Reads bytes as messages of other processes.
#pragma once

#include <string>
#include <string_view>

#include "tests/fuzz/mutants.h"
#include "zero/comm/admission.h"
#include "zero/comm/hub.h"
#include "zero/comm/message.h"

namespace ballast::testing {

// The hub of a job of three ranks, which have connected, gets the bytes of one of them.
inline void read_as_hub(std::string_view bytes) {
  Rendezvous rendezvous("job", 3, [](std::size_t, const Message& message) { to_wire(message); });
  for (std::size_t rank = 0; rank < 3; ++rank) {
    rendezvous.take(rank, {Message::Kind::hello, "job", to_line({rank, 3, "node", 100, "here"})});
  }
  Inbox inbox;
  inbox.add(bytes);
  may_refuse([&] {
    while (const auto message = inbox.next()) {
      rendezvous.take(1, *message);
      Handshake().read(*message, Secret("of the job"));
    }
  });
  if (rendezvous.has_late_ranks()) rendezvous.fail_with_late_ranks("5 s");
  rendezvous.ended(1);
}

inline void read_as_text(const std::string& text) {
  may_refuse([&] { require_holds(split(text).size() <= text.size(), "a value needs a byte"); });
  may_refuse([&] { member_from(text); });
  const auto share = share_from(text);
  require_holds(!share || share->rank < share->size, "the rank of a share is in its group");
  ranks_from(text);
}

}  // namespace ballast::testing
