// Nonzeros two by two, by dot products of pairs.
// RUN: gossamer-opt %s -p 'expose-storage,lower-pairs,canonicalize,cse' | filecheck %s

// x is packed as lines of 32 tokens a column: the even words of 32 tokens, then the odd ones, in the order that interleaving
// brings back to that of the tokens.
// CHECK-LABEL: func.func private @region_tile64(
// CHECK-LABEL: func.func private @region_tile32(
// CHECK-SAME:    %{{[a-z0-9]*}}: memref<?x64xbf16>, %{{[a-z0-9]*}}: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi16>, %[[VAL:[a-z0-9]*]]: memref<?xbf16>,
// CHECK:         %[[PACKED:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<64x32xbf16>
// CHECK-COUNT-32: vector.maskedload
// CHECK:         vector.shuffle %{{.*}} [0, 2, 4, 6, 32, 34, 36, 38, 8, 10, 12, 14, 40, 42, 44, 46, 16, 18,
// CHECK-NEXT:    vector.store %{{.*}}, %[[PACKED]]
// CHECK:         vector.shuffle %{{.*}} [1, 3, 5, 7, 33, 35, 37, 39,
// CHECK:         vector.store %{{.*}}, %[[PACKED]]

// A long row takes two pairs at a time. Two columns become two vectors of 16 tokens' pairs.
// CHECK:         scf.for %[[P:.*]] = %{{[a-z0-9_#]*}} to %{{[a-z0-9_#]*}} step %c2 iter_args(%[[S0:[a-z0-9]*]] = %{{[a-z0-9_#]*}}, %[[S1:[a-z0-9]*]] = %{{[a-z0-9_#]*}}, %{{[a-z0-9_#]*}} = %{{[a-z0-9_#]*}}, %{{[a-z0-9_#]*}} = %{{[a-z0-9_#]*}})
// CHECK:           memref.load %[[CRD]]
// CHECK:           memref.load %[[CRD]]
// CHECK:           vector.load %[[VAL]][%{{.*}}] : memref<?xbf16>, vector<2xbf16>
// CHECK:           %[[W:.*]] = vector.bitcast %{{.*}} : vector<16xi32> to vector<32xbf16>
// CHECK-NEXT:      %[[A:.*]] = vector.load %[[PACKED]]
// CHECK-NEXT:      %[[B:.*]] = vector.load %[[PACKED]]
// CHECK-NEXT:      %[[LOW:.*]] = vector.shuffle %[[A]], %[[B]] [0, 32, 1, 33, 2, 34, 3, 35, 8, 40,
// CHECK-NEXT:      %[[HIGH:.*]] = vector.shuffle %[[A]], %[[B]] [4, 36, 5, 37, 6, 38, 7, 39, 12, 44,
// CHECK-NEXT:      x86.avx512.dot %[[S0]], %[[W]], %[[LOW]]
// CHECK-NEXT:      x86.avx512.dot %[[S1]], %[[W]], %[[HIGH]]

// Sixteen tokens are half a line, whose pairs are in order.
// CHECK-LABEL: func.func private @region_tile16(
// CHECK:         vector.interleave
func.func @region(%x: tensor<?x64xbf16>, %w: tensor<40x64xbf16, "pairs(reduction=1, width=32)">, %bias: tensor<40xbf16>) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<40xbf16>) -> bf16
    %wide = arith.extf %b : bf16 to f32
    %0 = arith.addf %sum, %wide : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "pairs", tile = [64, 1024]} : (tensor<?x64xbf16>, tensor<40x64xbf16, "pairs(reduction=1, width=32)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}
