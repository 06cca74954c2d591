// Products of different families in one chain.
// RUN: gossamer-opt %s -p 'expose-storage,lower-chain,canonicalize,cse' --split-input-file | filecheck %s

// Blocks of four rows: their sums are in registers together. What they give beyond the last row has memory of its own.
// CHECK-LABEL: func.func private @blocks_product_tile4(
// CHECK:         memref.view %{{.*}} : memref<?xi8> to memref<12x4xf32>
// CHECK:         scf.for %{{.*}} iter_args(%{{[a-z0-9]*}} = %{{[a-z0-9_]*}}, %{{[a-z0-9]*}} = %{{[a-z0-9_]*}}, %{{[a-z0-9]*}} = %{{[a-z0-9_]*}}, %{{[a-z0-9]*}} = %{{[a-z0-9_]*}},
// CHECK-LABEL: func.func private @blocks_product1_tile4(
// CHECK:         vector.fma
// CHECK-LABEL: func.func @blocks(
// CHECK:             call @blocks_product_tile4
// CHECK:             call @blocks_product1_tile4
func.func @blocks(%x: tensor<?x8xf32>, %v: tensor<10x8xf32, "blocks(reduction=1, rows=4, columns=2, width=8)">, %w: tensor<8x10xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32> {
  %h = "kernel.spmm"(%x, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "block", tile = [4, 8]} : (tensor<?x8xf32>, tensor<10x8xf32, "blocks(reduction=1, rows=4, columns=2, width=8)">) -> tensor<?x10xf32>
  %y = "kernel.spmm"(%h, %w) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 4 : i64, reduction = 1 : i64, schedule = "rowpairs", tile = [4, 8]} : (tensor<?x10xf32>, tensor<8x10xf32, "rowpairs(reduction=1, width=16)">) -> tensor<?x8xf32>
  return %y : tensor<?x8xf32>
}

// -----

// Products of pairs read x as columns of bf16. Where others read x, too, it is rounded in a step of its own; what nothing but such
// a product reads is made so at once.
// CHECK-LABEL: func.func private @rounded_round_tile32(
// CHECK:         arith.truncf {{.*}} vector<16xf32> to vector<16xbf16>
// CHECK:         vector.shuffle
// CHECK:         vector.store {{.*}} memref<32x32xbf16>, vector<32xbf16>
// CHECK-LABEL: func.func private @rounded_product_tile32(
// CHECK:         x86.avx512.dot
// CHECK:         vector.store {{.*}} memref<32x32xbf16>, vector<32xbf16>
// CHECK-LABEL: func.func private @rounded_product1_tile32(
// CHECK:         x86.avx512.dot
// CHECK:         vector.store {{.*}} memref<32x32xf32>, vector<16xf32>
// CHECK-LABEL: func.func @rounded(
// CHECK:             call @rounded_pack_tile32
// CHECK:             call @rounded_round_tile32
// CHECK:             call @rounded_product_tile32
// CHECK:             call @rounded_product1_tile32
// CHECK-NOT:         call @rounded_unpack_tile32
// CHECK:         } else {
func.func @rounded(%x: tensor<?x32xf32>, %v: tensor<32x32xbf16, "pairs(reduction=1, width=32)">, %w: tensor<32x32xbf16, "pairs(reduction=1, width=32)">) -> tensor<?x32xf32> {
  %h = "kernel.spmm"(%x, %v) ({
  ^bb0(%sum: f32):
    "kernel.yield"(%sum) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "pairs", tile = [32, 16]} : (tensor<?x32xf32>, tensor<32x32xbf16, "pairs(reduction=1, width=32)">) -> tensor<?x32xf32>
  %y = "kernel.spmm"(%h, %w) ({
  ^bb0(%sum: f32):
    %g = "kernel.read"(%x) {map = affine_map<(t, m) -> (t, m)>} : (tensor<?x32xf32>) -> f32
    %0 = arith.addf %sum, %g : f32
    "kernel.yield"(%0) : (f32) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "pairs", tile = [32, 16]} : (tensor<?x32xf32>, tensor<32x32xbf16, "pairs(reduction=1, width=32)">) -> tensor<?x32xf32>
  return %y : tensor<?x32xf32>
}

// -----

// Blocks of bf16 read x as lines, two columns side by side, and so their results are stored for the next one: two rows at a time.
// With a single vector of tokens, 16 rows have their sums in registers.
// CHECK-LABEL: func.func private @dots_pack_tile64(
// CHECK:         memref.view %{{.*}} : memref<?xi8> to memref<16x128xbf16>
// CHECK-LABEL: func.func private @dots_product_tile64(
// CHECK-COUNT-4: vector.load %{{.*}} : memref<16x128xbf16>, vector<32xbf16>
// CHECK-COUNT-16: x86.avx512.dot
// CHECK:         vector.interleave %{{.*}} : vector<16xbf16> -> vector<32xbf16>
// CHECK-NEXT:    vector.store %{{.*}} : memref<16x128xbf16>, vector<32xbf16>
// CHECK-LABEL: func.func private @dots_product_tile16(
// CHECK:         vector.load %{{.*}} : memref<16x32xbf16>, vector<32xbf16>
// CHECK-COUNT-16: x86.avx512.dot
// CHECK-NEXT:    arith.addi
func.func @dots(%x: tensor<?x32xbf16>, %v: tensor<32x32xbf16, "vnni(reduction=1, rows=32, columns=32)">, %w: tensor<32x32xbf16, "vnni(reduction=1, rows=32, columns=32)">) -> tensor<?x32xbf16> {
  %h = "kernel.spmm"(%x, %v) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "bf16dot", tile = [96, 96]} : (tensor<?x32xbf16>, tensor<32x32xbf16, "vnni(reduction=1, rows=32, columns=32)">) -> tensor<?x32xbf16>
  %y = "kernel.spmm"(%h, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "bf16dot", tile = [96, 96]} : (tensor<?x32xbf16>, tensor<32x32xbf16, "vnni(reduction=1, rows=32, columns=32)">) -> tensor<?x32xbf16>
  return %y : tensor<?x32xbf16>
}

// -----

// AMX leaves its sums in memory, from where they go through the epilogue two rows at a time.
// CHECK-LABEL: func.func private @tiles_product_tile64(
// CHECK:         %[[SUMS:.*]] = memref.alloca() {alignment = 64 : i64} : memref<32x64xf32>
// CHECK-COUNT-4: x86.amx.tile_mulf
// CHECK-COUNT-4: x86.amx.tile_store %[[SUMS]]
// CHECK-COUNT-4: x86.amx.tile_mulf
// CHECK-COUNT-4: x86.amx.tile_store %[[SUMS]]
// CHECK:         scf.for %{{.*}} = %c0 to %c32 step %c2 {
// CHECK-COUNT-8: vector.load %[[SUMS]]
// CHECK:           vector.store %{{.*}} : memref<16x128xbf16>, vector<32xbf16>
func.func @tiles(%x: tensor<?x32xbf16>, %v: tensor<32x32xbf16, "panels(reduction=1, rows=32, width=32)">, %w: tensor<32x32xbf16, "panels(reduction=1, rows=32, width=32)">) -> tensor<?x32xbf16> {
  %h = "kernel.spmm"(%x, %v) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxcolumns", tile = [32]} : (tensor<?x32xbf16>, tensor<32x32xbf16, "panels(reduction=1, rows=32, width=32)">) -> tensor<?x32xbf16>
  %y = "kernel.spmm"(%h, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amxcolumns", tile = [32]} : (tensor<?x32xbf16>, tensor<32x32xbf16, "panels(reduction=1, rows=32, width=32)">) -> tensor<?x32xbf16>
  return %y : tensor<?x32xbf16>
}
