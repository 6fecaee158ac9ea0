// Device conveniences and queries with arguments that are refused.
#include <gtest/gtest.h>

#include "bad_input.h"

namespace hybridopt::fault {
namespace {

// ------------------------------------------------------------------------- device conveniences --

INSTANTIATE_TEST_SUITE_P(
    Device, Anytime,
    testing::Values(
        Row{"InfoNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"info is NULL"},
            [](Trainer& t) { return offload_context_get_info(t.context, nullptr); }},
        Row{"PlanNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"plan is NULL"},
            [](Trainer& t) { return offload_optimizer_plan(t.optimizer, nullptr); }},
        Row{"StatsNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"stats is NULL"},
            [](Trainer& t) { return offload_optimizer_get_stats(t.optimizer, nullptr); }},
        Row{"StatsStructSize",
            OFFLOAD_INVALID_ARGUMENT,
            {"stats.struct_size is 0", "expected"},
            [](Trainer& t) {
              offload_stats_t stats{};
              return offload_optimizer_get_stats(t.optimizer, &stats);
            }},
        Row{"AllocNothing",
            OFFLOAD_INVALID_ARGUMENT,
            {"bytes is 0", "at least 1"},
            [](Trainer& t) {
              void* data;
              return offload_device_alloc(t.context, 0, &data);
            }},
        Row{"AllocOutNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"data is NULL"},
            [](Trainer& t) { return offload_device_alloc(t.context, 64, nullptr); }},
        Row{"FreeUnknown",
            OFFLOAD_INVALID_ARGUMENT,
            {"data is", "has not been freed"},
            [](Trainer& t) { return offload_device_free(t.context, host_array); }},
        Row{"FreeInside",
            OFFLOAD_INVALID_ARGUMENT,
            {"data is"},
            [](Trainer& t) { return offload_device_free(t.context, Behind(t.data[0], 256)); }},
        Row{"FreeTwice",
            OFFLOAD_INVALID_ARGUMENT,
            {"data is", "of this context gave"},
            [](Trainer& t) {
              void* data = nullptr;
              EXPECT_OFFLOAD_OK(offload_device_alloc(t.context, 64, &data));
              EXPECT_OFFLOAD_OK(offload_device_free(t.context, data));
              return offload_device_free(t.context, data);
            }},
        Row{"UploadFromNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"host_data is NULL"},
            [](Trainer& t) {
              return offload_device_upload(t.context, t.data[0], nullptr, 4, nullptr);
            }},
        Row{"UploadToNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"device_data is NULL"},
            [](Trainer& t) {
              return offload_device_upload(t.context, nullptr, host_array, 4, nullptr);
            }},
        Row{"DownloadToNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"host_data is NULL"},
            [](Trainer& t) {
              return offload_device_download(t.context, nullptr, t.data[0], 4, nullptr);
            }},
        Row{"UploadOnUnknownStream",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) {
              return offload_device_upload(t.context, t.data[0], host_array, 4, kUnknownStream);
            }},
        Row{"DownloadOnUnknownStream",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) {
              return offload_device_download(t.context, host_array, t.data[0], 4, kUnknownStream);
            }},
        Row{"MapOutNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"mapped is NULL"},
            [](Trainer& t) { return offload_device_map(t.context, t.data[0], 4, nullptr); }},
        Row{"MapNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"4 bytes at"},
            [](Trainer& t) {
              void* mapped;
              return offload_device_map(t.context, nullptr, 4, &mapped);
            }},
        Row{"StreamOutNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is NULL"},
            [](Trainer& t) { return offload_stream_create(t.context, nullptr); }},
        Row{"StreamDestroyUnknown",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) { return offload_stream_destroy(t.context, kUnknownStream); }},
        Row{"SynchronizeUnknown",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) { return offload_stream_synchronize(t.context, kUnknownStream, 0); }},
        Row{"RunNull",
            OFFLOAD_INVALID_ARGUMENT,
            {"function is NULL"},
            [](Trainer& t) { return offload_stream_run(t.context, nullptr, nullptr, nullptr); }},
        Row{"RunOnUnknownStream",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) {
              return offload_stream_run(
                  t.context, kUnknownStream, [](void*) {}, nullptr);
            }}),
    RowName);

INSTANTIATE_TEST_SUITE_P(
    Range, OnSim,
    testing::Values(
        Row{"UploadPastTheEnd",
            OFFLOAD_INVALID_ARGUMENT,
            {"runs past the end"},
            [](Trainer& t) {
              return offload_device_upload(t.context, t.data[1], host_array, 5, nullptr);
            }},
        Row{"DownloadFromHostMemory",
            OFFLOAD_INVALID_ARGUMENT,
            {"not in this device's memory"},
            [](Trainer& t) {
              return offload_device_download(t.context, host_array, host_array + 1, 4, nullptr);
            }},
        Row{"DownloadToTheDevice",
            OFFLOAD_INVALID_ARGUMENT,
            {"expected host memory"},
            [](Trainer& t) {
              return offload_device_download(t.context, t.data[0], t.data[0], 4, nullptr);
            }},
        Row{"UploadEverything",
            OFFLOAD_INVALID_ARGUMENT,
            {"18446744073709551615 bytes"},
            [](Trainer& t) {
              return offload_device_upload(t.context, t.data[0], host_array, UINT64_MAX, nullptr);
            }},
        Row{"MapPastTheEnd",
            OFFLOAD_INVALID_ARGUMENT,
            {"runs past the end"},
            [](Trainer& t) {
              void* mapped;
              return offload_device_map(t.context, t.data[1], 5, &mapped);
            }},
        Row{"AllocTooMuch",
            OFFLOAD_OUT_OF_DEVICE_MEMORY,
            {"asked for 2097152 bytes", "1048576"},
            [](Trainer& t) {
              void* data;
              return offload_device_alloc(t.context, 2 << 20, &data);
            }},
        Row{"AllocEverything",
            OFFLOAD_OUT_OF_DEVICE_MEMORY,
            {"asked for 18446744073709551615 bytes"},
            [](Trainer& t) {
              void* data;
              return offload_device_alloc(t.context, UINT64_MAX, &data);
            }},
        Row{"StreamDestroyedTwice",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is", "has not been destroyed"},
            [](Trainer& t) {
              offload_stream_t stream = nullptr;
              EXPECT_OFFLOAD_OK(offload_stream_create(t.context, &stream));
              EXPECT_OFFLOAD_OK(offload_stream_destroy(t.context, stream));
              return offload_stream_destroy(t.context, stream);
            }},
        Row{"StreamOfAnotherContext",
            OFFLOAD_INVALID_ARGUMENT,
            {"stream is"},
            [](Trainer& t) {
              RunOptions run;
              Trainer other(run);
              offload_stream_t stream = nullptr;
              EXPECT_OFFLOAD_OK(offload_stream_create(other.context, &stream));
              return offload_stream_synchronize(t.context, stream, 0);
            }}),
    RowName);

}  // namespace
}  // namespace hybridopt::fault
