// Runs steps of the native step in a program of its own, which an emulator can run: reads a model and its steps from
// standard input, and writes the logits of each step to standard output. `emulated.py` is its only caller.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

extern "C" {
void* baton_decoder_new(const void* shape, int threads);
void baton_decoder_bind(void* decoder, const void* const* weights, void* kv, const float* cos, const float* sin);
void baton_decoder_dispatch(void* decoder, const int32_t* table, const int32_t* counts, int width, int dynamic);
int baton_decoder_forward(void* decoder, int pieces, const int32_t* packed, const void* const* embedded, int count,
                          const int32_t* wanted, float* logits);
void baton_decoder_free(void* decoder);
}

static void take(void* to, size_t size) {
    if (size && fread(to, size, 1, stdin) != 1) exit(3);
}

static int32_t number() {
    int32_t value;
    take(&value, sizeof value);
    return value;
}

// The next part of the input, which begins with its size in bytes; null for an empty one.
static void* part() {
    uint64_t size;
    take(&size, sizeof size);
    if (size == 0) return nullptr;
    void* data = operator new(size, std::align_val_t(64));
    take(data, size);
    return data;
}

int main() {
    int threads = number(), vocab = number(), tensors = number(), steps = number();
    void* shape = part();
    std::vector<const void*> weights(tensors);
    for (const void*& each : weights) each = part();
    void* kv = part();
    auto cos = static_cast<const float*>(part()), sin = static_cast<const float*>(part());
    auto table = static_cast<const int32_t*>(part()), counts = static_cast<const int32_t*>(part());
    int width = number(), dynamic = number();
    void* decoder = baton_decoder_new(shape, threads);
    if (!decoder) return 4;
    baton_decoder_bind(decoder, weights.data(), kv, cos, sin);
    if (table) baton_decoder_dispatch(decoder, table, counts, width, dynamic);
    for (int step = 0; step < steps; ++step) {
        int pieces = number(), rows = number();
        std::vector<float> logits(size_t(rows) * vocab);
        auto packed = static_cast<const int32_t*>(part());
        if (baton_decoder_forward(decoder, pieces, packed, nullptr, rows, nullptr, logits.data())) return 5;
        fwrite(logits.data(), sizeof(float), logits.size(), stdout);
    }
    baton_decoder_free(decoder);
    return 0;
}
