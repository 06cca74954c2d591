// Blocks of bf16 on AMX's tiles.
// RUN: gossamer-opt %s -p 'expose-storage,lower-amx,canonicalize,cse' --split-input-file | filecheck %s

// The workspace holds the sums of 32 tokens and 32 rows. Tiles of tokens are narrow where few blocks are stored.
// CHECK:       module attributes {kernel.workspace = 4096 : index}
// CHECK-LABEL: func.func private @region_tile32(
// CHECK-SAME:    %[[X:[a-z0-9]*]]: memref<?x64xbf16>, %[[POS:[a-z0-9]*]]: memref<?xi32>, %[[CRD:[a-z0-9]*]]: memref<?xi32>, %[[VAL:[a-z0-9]*]]: memref<?xbf16>,
// CHECK:         memref.load %[[POS]][%c2]
// CHECK:         %[[TILE:.*]] = arith.select %{{.*}}, %c32, %c128

// The last group of tokens is moved back so that no tile is loaded from beyond x.
// CHECK:         %[[LAST:.*]] = arith.subi %{{.*}}, %c32
// CHECK:         scf.for %[[STRIP:.*]] = %{{.*}} to %{{.*}} step %c1 {
// CHECK:           scf.for %[[GROUP:.*]] = %{{.*}} to %{{.*}} step %c32 {
// CHECK-NEXT:        %[[TOKEN:.*]] = arith.minui %[[GROUP]], %[[LAST]]

// Two tiles of the block, two of x as it lies in memory, four of sums.
// CHECK:             x86.amx.tile_zero
// CHECK:             %[[SUMS:.*]]:4 = scf.for %[[P:.*]] = %{{[a-z0-9_]*}} to %{{[a-z0-9_]*}} step %c1 iter_args(%[[S0:[a-z0-9]*]] = %{{[a-z0-9_]*}}, %[[S1:[a-z0-9]*]] = %{{[a-z0-9_]*}}, %[[S2:.*]] = %{{[a-z0-9_]*}}, %[[S3:[a-z0-9]*]] = %{{[a-z0-9_]*}}) ->
// CHECK-NEXT:          memref.load %[[CRD]][%[[P]]]
// CHECK:               %[[W0:.*]] = x86.amx.tile_load %[[VAL]][%{{.*}}], %c32
// CHECK:               %[[W1:.*]] = x86.amx.tile_load %[[VAL]][%{{.*}}], %c32
// CHECK:               %[[X0:.*]] = x86.amx.tile_load %[[X]][%[[TOKEN]], %[[K:.*]]]
// CHECK-NEXT:          x86.amx.tile_mulf %[[X0]], %[[W0]], %[[S0]]
// CHECK-NEXT:          x86.amx.tile_mulf %[[X0]], %[[W1]], %[[S1]]
// CHECK:               %[[X1:.*]] = x86.amx.tile_load %[[X]][%{{.*}}, %[[K]]]
// CHECK-NEXT:          x86.amx.tile_mulf %[[X1]], %[[W0]], %[[S2]]
// CHECK-NEXT:          x86.amx.tile_mulf %[[X1]], %[[W1]], %[[S3]]
// CHECK-NEXT:          scf.yield

// The sums go through memory and the epilogue, token by token; rows that do not exist are not stored.
// CHECK:             %[[MEMORY:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<32x32xf32>
// CHECK-COUNT-4:     x86.amx.tile_store %[[MEMORY]]
// CHECK:             scf.for %[[T:.*]] = %c0 to %c32 step %c1 {
// CHECK-NEXT:          vector.load %[[MEMORY]][%[[T]], %c0]
// CHECK:               vector.create_mask
// CHECK:               arith.addf
// CHECK:               arith.truncf
// CHECK:               vector.maskedstore
// CHECK:               vector.load %[[MEMORY]][%[[T]], %c16]

// Fewer tokens than a tile has are copied.
// CHECK-LABEL: func.func private @region_tile16(
// CHECK-LABEL: func.func private @region_copied16(
// CHECK:         %[[COPY:.*]] = memref.view %{{.*}} : memref<?xi8> to memref<16x64xbf16>
// CHECK:         vector.maskedload
// CHECK:         vector.store %{{.*}}, %[[COPY]]
// CHECK:         x86.amx.tile_load %[[COPY]]

// With fewer tiles of tokens than threads, strips are shared out too.
// CHECK-LABEL: func.func @region(
// CHECK:         scf.parallel
// CHECK:           func.call @region_tile32
// CHECK:             func.call @region_tile16
// CHECK:             func.call @region_copied16
func.func @region(%x: tensor<?x64xbf16>, %w: tensor<40x64xbf16, "vnni(reduction=1, rows=32, columns=32)">, %bias: tensor<40xbf16>) -> tensor<?x40xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %b = "kernel.read"(%bias) {map = affine_map<(t, m) -> (m)>} : (tensor<40xbf16>) -> bf16
    %wide = arith.extf %b : bf16 to f32
    %0 = arith.addf %sum, %wide : f32
    %1 = arith.truncf %0 : f32 to bf16
    "kernel.yield"(%1) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amx", tile = [32, 128]} : (tensor<?x64xbf16>, tensor<40x64xbf16, "vnni(reduction=1, rows=32, columns=32)">) -> tensor<?x40xbf16>
  return %y : tensor<?x40xbf16>
}

// -----

// Blocks of 16 rows: four tiles of tokens take turns with the block's one. K is no multiple of 32, so x is copied, with zeros.
// CHECK-LABEL: func.func private @narrow_copied64(
// CHECK:         memref.view %{{.*}} : memref<?xi8> to memref<128x64xbf16>
// CHECK:         scf.for {{.*}} iter_args
// CHECK:           %[[W:.*]] = x86.amx.tile_load
// CHECK-COUNT-4:   x86.amx.tile_mulf %{{.*}}, %[[W]],
// CHECK-LABEL: func.func private @narrow_copied32(
// CHECK-LABEL: func.func private @narrow_copied16(
// CHECK-NOT:   @narrow_tile
func.func @narrow(%x: tensor<?x50xbf16>, %w: tensor<16x50xbf16, "vnni(reduction=1, rows=16, columns=32)">) -> tensor<?x16xbf16> {
  %y = "kernel.spmm"(%x, %w) ({
  ^bb0(%sum: f32):
    %0 = arith.truncf %sum : f32 to bf16
    "kernel.yield"(%0) : (bf16) -> ()
  }) {lanes = 16 : i64, reduction = 1 : i64, schedule = "amx", tile = [64, 128]} : (tensor<?x50xbf16>, tensor<16x50xbf16, "vnni(reduction=1, rows=16, columns=32)">) -> tensor<?x16xbf16>
  return %y : tensor<?x16xbf16>
}
