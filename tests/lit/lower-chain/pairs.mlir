// A chain whose products are of bf16 multiplies pairs of bf16 in attention, too, where the target does; one of f32 does not.
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain{bf16=true}' | filecheck %s
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain' | filecheck %s --check-prefix=WIDE

// Queries and keys are rounded as pairs of features, values as rows of tokens: each tile keeps them for the others.
// CHECK-LABEL: func.func private @attention_attend_tile16(
// CHECK:         memref.load %{{.*}} : memref<?xi32>
// CHECK:         x86.avx512.dot
// CHECK:         vector.shuffle %{{.*}} : vector<16xbf16>, vector<16xbf16>
// CHECK:         x86.avx512.dot
// CHECK-LABEL: func.func @attention(
// CHECK:           call @attention_round_tile16
// CHECK:           call @attention_round1_tile16
// CHECK:             call @attention_attend_tile16
// WIDE-NOT:    x86.avx512.dot
func.func @attention(%x: tensor<?x8xbf16>, %w: tensor<8x8xbf16, "rowpairs(reduction=1, width=16)">, %length: index) -> tensor<?x8xbf16> {
  %q = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [16, 8]} : (tensor<?x8xbf16>, tensor<8x8xbf16, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xbf16>
  %y = "kernel.attend"(%q, %x, %x, %length) {
    operandSegmentSizes = array<i32: 1, 1, 1, 1, 0>, heads = 2 : i64, kv_heads = 2 : i64, head_size = 4 : i64,
    offsets = [0, 0, 0], scale = 0.5 : f64, causal = false, cap = 0.0 : f64, key_mask = false
  } : (tensor<?x8xbf16>, tensor<?x8xbf16>, tensor<?x8xbf16>, index) -> tensor<?x8xbf16>
  return %y : tensor<?x8xbf16>
}
